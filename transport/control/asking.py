"""Calls an HTTP server with a secret, for commands. A redirect never carries the secret to another server."""

from http.client import HTTPMessage
from typing import IO, Final
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, Request, build_opener


class _NoRedirects(HTTPRedirectHandler):
    """urllib sends every header, secrets included, to the target of a redirect."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        raise HTTPError(
            req.full_url, code, f"it redirects to {newurl}, which is not followed: name that URL instead", headers, fp
        )


_OPENER: Final = build_opener(_NoRedirects)


def answer_to(request: Request, timeout_s: float) -> bytes:
    """The body of an answer. Raises what urllib does, and HTTPError for a redirect, naming its target."""
    with _OPENER.open(request, timeout=timeout_s) as answer:
        found: bytes = answer.read()
        return found

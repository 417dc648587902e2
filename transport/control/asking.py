"""Calls an HTTP server with a secret, for commands. A redirect never carries the secret to another server."""

import ssl
from http.client import HTTPMessage
from pathlib import Path
from typing import IO, Final
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, HTTPSHandler, Request, build_opener


class _NoRedirects(HTTPRedirectHandler):
    """urllib sends every header, secrets included, to the target of a redirect."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        raise HTTPError(
            req.full_url, code, f"it redirects to {newurl}, which is not followed: use that URL instead", headers, fp
        )


_OPENER: Final = build_opener(_NoRedirects)


def trusting(certificates: Path, *, checks_names: bool = True) -> ssl.SSLContext:
    """What trusts the certificates of a PEM file and nothing else: authorities, or servers' own. Raises OSError."""
    context = ssl.create_default_context(cafile=str(certificates))
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = checks_names
    return context


def answer_to(request: Request, timeout_s: float, trust: ssl.SSLContext | None = None) -> bytes:
    """The body of an answer. Raises what urllib does, and HTTPError for a redirect, naming its target.

    Over HTTPS a server needs a certificate that this host trusts, or that `trust` does.
    """
    opener = _OPENER if trust is None else build_opener(_NoRedirects, HTTPSHandler(context=trust))
    with opener.open(request, timeout=timeout_s) as answer:
        found: bytes = answer.read()
        return found

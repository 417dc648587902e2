"""Calls an HTTP server with a secret, for commands. A redirect never carries the secret to another server."""

import ssl
from http.client import HTTPMessage
from pathlib import Path
from typing import IO, Final
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, HTTPSHandler, Request, build_opener


class _NoRedirects(HTTPRedirectHandler):
    """urllib sends every header, secrets included, to the target of a redirect."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        raise HTTPError(
            req.full_url, code, f"it redirects to {newurl}, which is not followed: use that URL instead", headers, fp
        )


NO_TLS: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")  # as releases of OpenSSL call it

_OPENER: Final = build_opener(_NoRedirects)


def checked_url(url: str) -> str:
    """`url` without a slash at its end. Raises ValueError, which says what is wrong with it."""
    if not url.startswith(("http://", "https://")):
        meant = f": http://{url}?" if "." in url or ":" in url else ", such as http://127.0.0.1:8000"
        raise ValueError(f"must be an http(s) URL{meant}")
    _ = urlsplit(url).port  # raises ValueError for one above 65535
    return url.rstrip("/")


def why_unanswered(error: OSError) -> str:
    """What a user reads of a server that does not answer: no numbers of errors, no lines of OpenSSL's source."""
    reason = error.reason if isinstance(error, URLError) else error
    if isinstance(reason, ssl.SSLCertVerificationError):
        # What a guard of ours refuses has words of its own, and none of OpenSSL's.
        return f"its certificate is not trusted: {getattr(reason, 'verify_message', '') or reason}"
    if isinstance(reason, ssl.SSLError) and reason.reason in NO_TLS:
        return "it does not speak TLS; is its URL http:// instead?"
    if isinstance(reason, OSError) and reason.strerror and not isinstance(reason, ssl.SSLError):
        return reason.strerror
    return str(reason)


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

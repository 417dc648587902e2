"""Asks a running gateway what operators may know, for the commands that show it."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException, InvalidURL
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import Request

from prfaas.errors import AskError
from transport.control.asking import answer_to, checked_url, trusting, why_unanswered
from transport.control.secret_files import located, read_secret

TIMEOUT_S: Final = 10.0
KEY_VARIABLE: Final = "PRFAAS_OPERATOR_KEY"  # where gateways ask operators for one
KEY_FILE_VARIABLE: Final = "PRFAAS_OPERATOR_KEY_FILE"
NEVER: Final[Mapping[str, str]] = {}


class GatewayClient:
    """One gateway, at the port that its operators reach. Raises AskError when it does not answer, or refuses."""

    def __init__(self, url: str, headers: Mapping[str, str] = NEVER, authority: Path | None = None) -> None:
        """Over HTTPS its certificate is one that `authority` signs, or is; without one, that this host trusts."""
        try:
            self.url = checked_url(url)
        except ValueError as exc:
            raise AskError(f"--url {url}: {exc}") from exc
        try:
            self._trust = trusting(authority) if authority is not None else None
        except OSError as exc:
            raise AskError(f"--ca {authority}: {exc.strerror or exc}") from exc
        key = _operator_key(os.environ)
        self._headers = {**({"Authorization": f"Bearer {key}"} if key else {}), **headers}

    def get(self, path: str, **query: object) -> Any:
        """What it answers at `path`, as JSON."""
        return self._json(self._answer(f"{path}{_query(query)}"))

    def lines(self, path: str, **query: object) -> list[Any]:
        """The same of JSON lines."""
        return [self._json(line) for line in self._answer(f"{path}{_query(query)}").splitlines()]

    def post(self, path: str, body: bytes, headers: Mapping[str, str] = NEVER, **query: object) -> Any:
        """What it answers to `body`, which is JSON."""
        return self._json(self._answer(f"{path}{_query(query)}", body, {**headers, "Content-Type": "application/json"}))

    @contextmanager
    def understood(self) -> Iterator[None]:
        """Around what reads an answer's fields. Raises AskError when the answer lacks one, or has another type."""
        try:
            yield
        except (KeyError, IndexError, TypeError, AttributeError) as exc:
            raise AskError(
                f"{self.url} does not answer like a gateway of this version: {type(exc).__name__}: {exc}"
            ) from exc

    def _json(self, told: bytes) -> Any:
        try:
            return json.loads(told)
        except (ValueError, RecursionError) as exc:
            raise AskError(f"{self.url} does not answer like a gateway: {exc}") from exc

    def _answer(self, path: str, body: bytes | None = None, headers: Mapping[str, str] = NEVER) -> bytes:
        try:
            request = Request(f"{self.url}{path}", body, {**self._headers, **headers})
            return answer_to(request, TIMEOUT_S, self._trust)
        except HTTPError as exc:
            raise AskError(f"{self.url} says {exc.code}: {_message(exc)}") from exc
        except (InvalidURL, ValueError) as exc:
            raise AskError(f"--url {self.url}: {exc}") from exc
        except HTTPException as exc:
            raise AskError(f"{self.url} does not answer like a gateway: {type(exc).__name__}") from exc
        except (URLError, TimeoutError, OSError) as exc:
            hint = "; --ca names the authority that signed it" if "certificate" in why_unanswered(exc) else ""
            raise AskError(f"no gateway answers at {self.url}: {why_unanswered(exc)}{hint}") from exc


def _operator_key(environment: Mapping[str, str]) -> str:
    """The key itself, or what is in the file that another variable names, as systemd's credentials are. Raises AskError."""
    if file := environment.get(KEY_FILE_VARIABLE):
        try:
            return read_secret(located(Path(), file, environment), environment)
        except (OSError, ValueError) as exc:
            raise AskError(f"{KEY_FILE_VARIABLE}={file}: {exc}") from exc
    return environment.get(KEY_VARIABLE, "")


def _query(fields: Mapping[str, object]) -> str:
    given = {name: str(value) for name, value in fields.items() if value is not None}
    return f"?{urlencode(given)}" if given else ""


def _message(exc: HTTPError) -> str:
    """What an error of OpenAI's shape says."""
    try:
        return str(json.loads(exc.read())["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError, HTTPException, RecursionError):
        return exc.reason

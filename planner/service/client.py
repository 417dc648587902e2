"""Asks a running plan service, for the commands."""

import getpass
import json
import os
import ssl
from collections.abc import Mapping
from http import HTTPStatus
from http.client import HTTPException, InvalidURL
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import Request

import msgspec

from planner.errors import ChangeRefused, InputError, ServiceUnusable
from planner.service.status import Status
from planner.solve.control.ledger import LedgerEntry
from transport.control.asking import answer_to, checked_url, why_unanswered
from transport.control.secret_files import read_secret
from transport.peers.rights import SERVE_PLAN
from transport.wire.asked_servers import AskedServers
from transport.wire.identity import Identity

TIMEOUT_S: Final = 10.0

T = TypeVar("T")


class PlanClient:
    """One service. Raises ServiceUnusable when it does not answer, ChangeRefused when it does not do as it is told."""

    def __init__(self, url: str, token_file: Path | None = None, identity: Identity | None = None) -> None:
        """`identity` is an operator's, for a service that asks for certificates."""
        try:
            self._url = checked_url(url)
        except ValueError as exc:
            raise InputError(f"--url {url}: {exc}") from exc
        self._trust = _trust(identity) if url.startswith("https://") else None
        self._headers = {"Content-Type": "application/json"}
        if token_file is not None:
            self._headers["Authorization"] = f"Bearer {read_secret(token_file)}"

    def status(self) -> Status:
        return self._decoded(self._answer("/status"), Status)

    def history(self, limit: int) -> list[LedgerEntry]:
        """The last changes, oldest first."""
        return self._decoded(self._answer(f"/history?{urlencode({'limit': limit})}"), list[LedgerEntry])

    def change(self, what: str, **fields: Any) -> Status:
        """`what` is apply, rollback, pause or resume; the service's log says that the user of this process asked."""
        return self._decoded(self._answer(f"/{what}", {"by": _user(), **fields}), Status)

    def _answer(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"{self._url}{path}", data, self._headers)
        try:
            return answer_to(request, TIMEOUT_S, self._trust)
        except HTTPError as exc:
            raise self._refusal(exc) from exc
        except InvalidURL as exc:
            raise InputError(f"--url {self._url}: {exc}") from exc
        except HTTPException as exc:
            raise ServiceUnusable(f"{self._url} does not answer like a plan service: {type(exc).__name__}") from exc
        except (URLError, TimeoutError, OSError) as exc:
            raise ServiceUnusable(f"no plan service answers at {self._url}: {why_unanswered(exc)}") from exc

    def _refusal(self, exc: HTTPError) -> Exception:
        try:
            text = json.loads(exc.read())["error"]
        except (ValueError, KeyError, TypeError, OSError, HTTPException, RecursionError):
            text = None
        if not isinstance(text, str):
            return ServiceUnusable(f"{self._url} does not answer like a plan service: {exc.code} {exc.reason}")
        if exc.code == HTTPStatus.CONFLICT:
            return ChangeRefused(text)
        return ServiceUnusable(f"the plan service at {self._url}: {text}")

    def _decoded(self, body: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise ServiceUnusable(f"{self._url} is not a plan service of this version: {exc}") from exc


def _trust(identity: Identity | None) -> ssl.SSLContext | None:
    if identity is None:
        return None
    try:
        return AskedServers(identity, SERVE_PLAN).context()
    except OSError as exc:
        raise InputError(str(exc)) from exc


def _user() -> str:
    """Who runs this process; a container's user may have no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"

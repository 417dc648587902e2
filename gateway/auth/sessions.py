"""Sessions of operators' browsers: after an operator's key has been shown once, a cookie stands for it for some hours.

A cookie holds a random token. Its SHA-256 is the session's name here, so a reader of this memory cannot use it. A session
remembers the digest of the key: it ends with that key, by logging out, and after its time. A token is shown once, too. Its
session remembers whom it named, and ends with it at the latest.
"""

import os
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from hashlib import sha256
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Final, Protocol

import msgspec

from gateway.auth.operator import Operator

COOKIE: Final = "prfaas_session"
TOKEN_BYTES: Final = 32
MOST_SESSIONS: Final = 256  # the one that began first makes place for a further one
MOST_OF_ONE: Final = 16  # of a key, or of a person: so a viewer cannot end the others'
MAX_COOKIE_CHARS: Final = 4096


class OperatorSession(msgspec.Struct, frozen=True):
    """Whose key was shown, by its digest, and until when that counts; `operator` is whom a token named."""

    key_digest: str
    ends_unix_s: float
    operator: Operator | None = None

    @property
    def whose(self) -> str:
        """The key's digest, or the person of a token."""
        return self.key_digest if self.operator is None else str(self.operator)


class SessionStore(Protocol):
    """Keeps sessions by name."""

    def put(self, name: str, session: OperatorSession) -> None:
        """Raises OSError."""
        ...

    def get(self, name: str) -> OperatorSession | None: ...
    def drop(self, name: str) -> None: ...


class LocalSessions:
    """Of this process alone."""

    def __init__(self) -> None:
        self._sessions: dict[str, OperatorSession] = {}

    def put(self, name: str, session: OperatorSession) -> None:
        for leaving in _that_make_place(self._sessions.items(), session.whose):
            del self._sessions[leaving]
        self._sessions[name] = session

    def get(self, name: str) -> OperatorSession | None:
        return self._sessions.get(name)

    def drop(self, name: str) -> None:
        self._sessions.pop(name, None)


class SharedSessions:
    """Of all workers of a gateway: a small file for each, in a folder of theirs alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, name: str, session: OperatorSession) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        known = sorted(self._folder.iterdir(), key=_began)
        for leaving in _that_make_place(((file.name, self.get(file.name)) for file in known), session.whose):
            (self._folder / leaving).unlink(missing_ok=True)
        written = self._folder / f".{name}"
        written.write_bytes(msgspec.json.encode(session))
        written.rename(self._folder / name)

    def get(self, name: str) -> OperatorSession | None:
        try:
            return msgspec.json.decode((self._folder / name).read_bytes(), type=OperatorSession)
        except (OSError, msgspec.DecodeError):
            return None

    def drop(self, name: str) -> None:
        with suppress(OSError):
            (self._folder / name).unlink(missing_ok=True)


def _that_make_place(known: Iterable[tuple[str, OperatorSession | None]], whose: str) -> list[str]:
    """The names of sessions that end before one of `whose` begins; `known` has the oldest first."""
    names: list[str] = []
    own: list[str] = []
    for name, session in known:
        names.append(name)
        if session is not None and session.whose == whose:
            own.append(name)
    leaving = own[: max(0, len(own) - MOST_OF_ONE + 1)]
    others = [name for name in names if name not in leaving]
    return leaving + others[: max(0, len(others) - MOST_SESSIONS + 1)]


def _began(file: Path) -> float:
    try:
        return os.stat(file).st_mtime
    except OSError:  # another worker was faster
        return 0.0


class OperatorSessions:
    """Begins and ends sessions of at most `length_s`."""

    def __init__(self, store: SessionStore, length_s: float) -> None:
        self.length_s = length_s
        self._store = store

    def begin(self, key_digest: str, unix_s: float, operator: Operator | None = None) -> str:
        """The cookie of a new session; `operator` is whom a token names that is shown. Raises OSError."""
        token = secrets.token_urlsafe(TOKEN_BYTES)
        ends = unix_s + self.length_s
        if operator is not None and operator.until_unix_s is not None:
            ends = min(ends, operator.until_unix_s)
        self._store.put(_name(token), OperatorSession(key_digest, ends, operator))
        return token

    def of(self, headers: Mapping[str, str], unix_s: float) -> OperatorSession | None:
        """The session of a request's cookie; None without one that holds."""
        token = token_in(headers)
        session = self._store.get(_name(token)) if token else None
        if session is not None and unix_s >= session.ends_unix_s:
            self._store.drop(_name(token))
            return None
        return session

    def end(self, headers: Mapping[str, str]) -> None:
        """Ends the session of a request's cookie."""
        if token := token_in(headers):
            self._store.drop(_name(token))


def token_in(headers: Mapping[str, str]) -> str:
    """The session's token in a Cookie header; "" without one."""
    text = headers.get("Cookie", "")
    if COOKIE not in text or len(text) > MAX_COOKIE_CHARS:
        return ""
    try:
        found = SimpleCookie(text).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found is not None else ""


def _name(token: str) -> str:
    return sha256(token.encode("utf-8", "surrogateescape")).hexdigest()

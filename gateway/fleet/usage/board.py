"""What a gateway knows of its fleet's usage: of one process, or of all its workers and the generation that replaces them."""

import os
import uuid
from pathlib import Path
from typing import Protocol

import msgspec

from gateway.fleet.errors import FleetFailed
from gateway.fleet.usage.runs import OwnRun


class SeenUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What lay in the registry at `read_at` (0: it was never read), and this gateway's own run.

    `due_s` is after how many seconds it is to be read again. `is_refused`: since `read_at` nothing can be written, by
    others neither perhaps.
    """

    own: OwnRun
    folded: bytes = b""
    runs: dict[str, bytes] = {}
    is_cut: bool = False
    is_refused: bool = False
    read_at: float = 0.0
    due_s: float = 0.0


class UsageBoard(Protocol):
    """Has the latest."""

    def show(self, seen: SeenUsage) -> None:
        """Raises OSError."""
        ...

    def seen(self) -> SeenUsage | None:
        """Raises OSError, FleetFailed."""
        ...


class LocalUsageBoard:
    """Of this process alone."""

    def __init__(self) -> None:
        self._seen: SeenUsage | None = None

    def show(self, seen: SeenUsage) -> None:
        self._seen = seen

    def seen(self) -> SeenUsage | None:
        return self._seen


class SharedUsageBoard:
    """A file, which one process at a time replaces as a whole."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def show(self, seen: SeenUsage) -> None:
        new = self._path.with_name(f"{self._path.name}.{uuid.uuid4().hex}")
        try:
            new.write_bytes(msgspec.msgpack.encode(seen))
            os.replace(new, self._path)
        finally:
            new.unlink(missing_ok=True)

    def seen(self) -> SeenUsage | None:
        """None: there is nothing yet."""
        try:
            return msgspec.msgpack.decode(self._path.read_bytes(), type=SeenUsage)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:  # to begin anew would count twice
            raise FleetFailed("malformed", f"what this gateway knows of usage cannot be read: {error}") from error

"""The configuration, read again while the gateway runs: by SIGHUP, or by an operator, whose answer says what differs.

    GET  /prfaas/config ──► what the file says now that the gateway does not do
    POST /prfaas/config ──► the same, and what can change while it runs has changed

Of several workers the one that is asked tells the process that started them, which tells all.
"""

import logging
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Final, Protocol

import msgspec

from gateway.config.gateway import GatewayConfig
from gateway.errors import ApiError, GatewayConfigError, Unavailable

log = logging.getLogger("prfaas.gateway")

SECRET: Final = frozenset({"keys", "operator_keys"})  # digests, but still not to be shown
_PASSWORD: Final = re.compile(r"(://)[^/?#\s]*@")  # and the name before it, in a URL (RFC 3986, 3.2.1)


class ConfigChange(msgspec.Struct, frozen=True):
    """A key that the file gives another value, both as text; `needs_restart` if a running gateway cannot take it over."""

    key: str
    is_now: str
    will_be: str
    needs_restart: bool


def changes(running: GatewayConfig, wanted: GatewayConfig) -> list[ConfigChange]:
    """What differs, key by key, spelled as in the file: `routing.tie_share`, `tenants.acme.weight`."""
    staying = {key for key, *_ in _differences("", running.with_changes_of(wanted), wanted)}
    return [
        ConfigChange(key, _told(key, was), _told(key, will), key in staying)
        for key, was, will in _differences("", running, wanted)
    ]


def _differences(key: str, was: Any, will: Any) -> Iterator[tuple[str, Any, Any]]:
    if was == will:
        return
    before = f"{key}." if key else ""
    if is_dataclass(was) and type(was) is type(will):
        for each in fields(was):
            yield from _differences(before + each.name, getattr(was, each.name), getattr(will, each.name))
    elif isinstance(was, Mapping) and isinstance(will, Mapping):
        for name in sorted(was.keys() | will.keys()):
            yield from _differences(before + name, was.get(name), will.get(name))
    else:
        yield key, was, will


def _told(key: str, value: Any) -> str:
    if value is None:
        return "none"
    if key.rpartition(".")[2] in SECRET:
        return f"{len(value)} digests"
    if isinstance(value, tuple) and any(map(is_dataclass, value)):
        return "; ".join(_told(key, each) for each in value)
    if is_dataclass(value):
        parts = ((each.name, getattr(value, each.name)) for each in fields(value))
        return ", ".join(f"{name} = {_told(name, part)}" for name, part in parts)
    return _PASSWORD.sub(r"\1…@", str(value))


class Reconfigurable(Protocol):
    """A part of a running gateway that takes over what may change."""

    def configure(self, config: GatewayConfig) -> None: ...


class Reloads:
    """Has what runs take over what the file says; `config` is what it runs by."""

    def __init__(
        self,
        config: GatewayConfig,
        parts: Sequence[Reconfigurable],
        read_again: Callable[[], GatewayConfig],
        on_outcome: Callable[[str], None],
        parent: int | None = None,
    ) -> None:
        """`parent` is the process that has all workers reload when it gets a SIGHUP; None: there are no others."""
        self.config = config
        self._parts = parts
        self._read_again = read_again
        self._on_outcome = on_outcome
        self._parent = parent

    def take(self, wanted: GatewayConfig) -> list[str]:
        """Takes over what may change while the gateway runs; the keys that differ and may not are returned."""
        possible = self.config.with_changes_of(wanted)
        for part in self._parts:
            part.configure(possible)
        self.config = possible
        return possible.differences(wanted)

    def pending(self) -> list[ConfigChange]:
        """What the file says that the gateway does not do. Raises ApiError for a file that is wrong."""
        return changes(self.config, self._read())

    def ask(self) -> list[ConfigChange]:
        """Reloads, in all workers. Raises ApiError for a file that is wrong: everything stays as it was."""
        found = self.pending()
        if self._parent is None:
            self.run()
        elif os.getppid() == self._parent:
            os.kill(self._parent, signal.SIGHUP)
        else:
            raise Unavailable("The process that supervises the workers is gone.", "not_shared")
        return found

    def run(self) -> None:
        """Reloads in this process; the log says what came of it."""
        try:
            wanted = self._read_again()
        except GatewayConfigError as error:
            self._on_outcome("refused")
            log.error("the configuration stays as it was: %s", error)
            return
        found = changes(self.config, wanted)
        self.take(wanted)
        is_partial = any(each.needs_restart for each in found)
        self._on_outcome("partial" if is_partial else "ok")
        for each in found:
            if each.needs_restart:
                log.warning("%s = %s: only a restart makes it %s", each.key, each.is_now, each.will_be)
            else:
                log.info("%s was %s, is %s", each.key, each.is_now, each.will_be)
        log.info("configuration reloaded, %d keys differed", len(found))

    def _read(self) -> GatewayConfig:
        try:
            return self._read_again()
        except GatewayConfigError as error:
            raise ApiError(409, f"The file was not applied: {error}", code="bad_config") from error

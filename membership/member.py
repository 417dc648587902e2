"""One node of a fleet, as a registry names it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from transport.control.settings import require
from transport.path.tcp import is_loopback

MAX_WORD_CHARS: Final = 255
MAX_PORT_DIGITS: Final = 5
MAX_LABELS: Final = 64
MAX_LABEL_CHARS: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A node's identity, and where its agent answers gRPC. Everything else about the node, the agent says itself.

    `id` stays the same wherever the node runs: the node's node_id, or its agent's address where a file gives no other.
    `agent` is host:port. `name` is what its certificate must carry, where that is not the host.
    `cluster`, `role` and `revision` are what the registry says before the agent has been heard. `labels` are the
    operator's own, such as a rack or a zone.
    """

    id: str
    agent: str
    name: str = ""
    cluster: str = ""
    role: str = ""
    revision: str = ""
    labels: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(bool(self.id), "id", self.id, "a name")
        require_address("agent", self.agent)
        for key in ("id", "agent", "name", "cluster", "role", "revision"):
            value = getattr(self, key)
            is_word = len(value) <= MAX_WORD_CHARS and value.isprintable() and " " not in value
            require(is_word, key, value, f"at most {MAX_WORD_CHARS} characters that can be printed, and no blanks")
        require(len(self.labels) <= MAX_LABELS, "labels", len(self.labels), f"at most {MAX_LABELS}")
        for key, value in self.labels.items():
            is_short = isinstance(value, str) and len(key) + len(value) <= MAX_LABEL_CHARS
            require(is_short, f"labels.{key}", value, f"a string of at most {MAX_LABEL_CHARS} characters, name and all")

    @property
    def is_here(self) -> bool:
        """Whether the way to its agent does not leave this machine."""
        return is_here(self.agent)


def require_address(name: str, address: str) -> None:
    """Raises SettingsError for what is no host:port."""
    host, _, port = address.rpartition(":")
    is_whole = host.startswith("[") and host.endswith("]") if ":" in host else bool(host)
    is_number = port.isascii() and port.isdigit() and len(port) <= MAX_PORT_DIGITS
    is_port = is_number and 0 < int(port) < 65536
    require(is_whole and is_port, name, address, "host:port with a port from 1 to 65535, an IPv6 address in brackets")


def is_here(address: str) -> bool:
    """Whether the way to host:port does not leave this machine."""
    return is_loopback(address.rpartition(":")[0].strip("[]"))

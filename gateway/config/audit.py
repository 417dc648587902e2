"""`[gateway.audit]`: where it is written who changed what."""

from dataclasses import dataclass

from transport.control.settings import WrittenPath, require


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig:
    """`[gateway.audit]`: changes and refused attempts are lines in files of `directory`, of `max_bytes` at most together."""

    directory: WrittenPath | None = None
    max_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        require(self.max_bytes >= 1 << 20, "audit.max_bytes", self.max_bytes, "at least 1048576 bytes")

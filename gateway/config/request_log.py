"""`[gateway.request_log]`: where finished requests are written."""

from dataclasses import dataclass

from transport.control.settings import WrittenPath, require


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLogConfig:
    """`[gateway.request_log]`: nothing is written without a `directory`, and at most `max_bytes` are kept in it."""

    directory: WrittenPath | None = None
    max_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        require(self.max_bytes >= 1 << 20, "request_log.max_bytes", self.max_bytes, "at least 1048576 bytes")

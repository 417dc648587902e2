"""`[gateway.timeouts]`: how long each step of a request may take."""

from dataclasses import dataclass, fields

from transport.control.settings import require


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long each step may take, in seconds. Streams have no limit in total, only between two chunks."""

    connect_s: float = 5.0
    rpc_s: float = 5.0
    prefill_s: float = 600.0
    first_token_s: float = 600.0
    stream_idle_s: float = 120.0
    client_stall_s: float = 120.0
    body_s: float = 60.0
    read_s: float = 120.0
    answer_s: float = 1800.0
    reservation_ttl_s: float = 660.0
    drain_s: float = 600.0
    room_s: float = 30.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            require(value > 0, each.name, value, "a number of seconds above 0")

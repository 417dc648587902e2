"""Stand-ins for tests, in round numbers."""

from typing import Any

from engine.emulated.standin import StandIn


def stand_in(**changes: Any) -> StandIn:
    """A prompt takes 0.5 s and 1 ms per token, a decode step 20 ms and 5 ms per request."""
    values: dict[str, Any] = {
        "model": "m",
        "fixed_bytes": 3 * 4096,
        "bytes_per_token": 64,
        "prefill_points": ((0, 0.5), (1000, 1.5), (2000, 2.5)),
        "max_running": 4,
        "step_s": 0.02,
        "step_s_per_request": 0.005,
    }
    return StandIn(**(values | changes))

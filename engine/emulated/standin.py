"""Reads what an engine without a model imitates: the sizes of a model's KVCache and the times of some hardware. The
file's writer has scaled all numbers to this machine. One token here may stand for many of the model's. So bytes are
counted per token here, and an answer's token takes `steps_per_token` decode steps.
"""

import math
from bisect import bisect_right
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec

from engine.emulated.emulated import DIGEST_BYTES
from engine.errors import ModelError
from hybrid_cache.layout.layout import KVCacheGroup, ModelLayout
from hybrid_cache.layout.spec import FullAttention, KVCacheSpec, LinearState, SlidingWindow

STATE_LAYERS: Final = 3  # that the fixed bytes are split into; attention is one layer, and so is each kind of window
LEAST_ROW_BYTES: Final = 2 * DIGEST_BYTES  # K and V each hold a digest, else they could not be checked
FASTEST_STEP_S: Final = 1e-6


class StandInWindow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sliding-window layers together."""

    window_tokens: int
    bytes_per_token: int


class StandIn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model on some hardware.

    `prefill_points` are (tokens, seconds) of prompts without a cached prefix, joined by straight lines; the first is at 0
    tokens: what a prompt costs the server and not its processors. At most `max_running` requests run at once, and a decode step
    with b of them takes `step_s + step_s_per_request · b`; 0 on hardware that only prefills.
    """

    model: str
    fixed_bytes: int
    bytes_per_token: int
    windows: tuple[StandInWindow, ...] = ()
    prefill_points: tuple[tuple[float, float], ...]
    max_running: int
    step_s: float = 0.0
    step_s_per_request: float = 0.0
    steps_per_token: float = 1.0

    def check(self) -> None:
        """Raises ModelError for numbers that nothing can be emulated from."""
        rows = [self.bytes_per_token, *(window.bytes_per_token for window in self.windows)]
        if min(rows) < LEAST_ROW_BYTES:
            raise ModelError(f"{self.model}: {min(rows)} bytes per token; at least {LEAST_ROW_BYTES} can be checked")
        if 0 < self.fixed_bytes < STATE_LAYERS * DIGEST_BYTES or self.fixed_bytes < 0:
            raise ModelError(f"{self.model}: fixed_bytes = {self.fixed_bytes}: 0, or {STATE_LAYERS * DIGEST_BYTES} on")
        if len(self.prefill_points) < 2 or self.prefill_points[0][0] != 0:
            raise ModelError(f"{self.model}: prefill_points: at least two, the first at 0 tokens")
        if any(after[0] <= before[0] or after[1] < before[1] for before, after in pairwise(self.prefill_points)):
            raise ModelError(f"{self.model}: prefill_points: more tokens must come later and take no less time")
        if self.max_running < 1 or self.steps_per_token <= 0 or min(self.step_s, self.step_s_per_request) < 0:
            raise ModelError(f"{self.model}: max_running and steps_per_token must be positive, no step negative")

    def prefill_s(self, num_tokens: int) -> float:
        """Seconds for a prompt of `num_tokens`; beyond the last point as between the last two."""
        at = min(max(bisect_right(self.prefill_points, (num_tokens, math.inf)), 1), len(self.prefill_points) - 1)
        (x0, y0), (x1, y1) = self.prefill_points[at - 1], self.prefill_points[at]
        return y0 + (y1 - y0) * (num_tokens - x0) / (x1 - x0)

    def decode_step_s(self, running: int) -> float:
        """Seconds of a decode step with `running` requests."""
        return max(FASTEST_STEP_S, self.step_s + self.step_s_per_request * running)

    def layout(self, block_size: int) -> ModelLayout:
        """A layout with as many bytes as the model's KVCache, in few layers: transfers need nothing more."""
        specs: list[KVCacheSpec] = [FullAttention(self.bytes_per_token, self.bytes_per_token // 2)]
        specs += [SlidingWindow(w.window_tokens, w.bytes_per_token, w.bytes_per_token // 2) for w in self.windows]
        groups = [KVCacheGroup(spec, (number,)) for number, spec in enumerate(specs)]
        if self.fixed_bytes:
            layers = tuple(range(len(specs), len(specs) + STATE_LAYERS))
            groups.append(KVCacheGroup(LinearState(self.fixed_bytes // STATE_LAYERS), layers))
        return ModelLayout(model=f"emulated-{self.model}", dtype="uint8", block_size=block_size, groups=tuple(groups))


def constant(model: str, prefill_s_per_token: float, decode_step_s: float, max_running: int) -> StandIn:
    """Times that do not depend on how long a prompt is or how many decode. For a layout that is known: there are no sizes."""
    return StandIn(
        model=model,
        fixed_bytes=0,
        bytes_per_token=LEAST_ROW_BYTES,
        prefill_points=((0.0, 0.0), (1.0, prefill_s_per_token)),
        max_running=max_running,
        step_s=decode_step_s,
    )


def read_stand_in(path: Path) -> StandIn:
    """Raises ModelError with the file's name in it."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=StandIn)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise ModelError(f"{path}: not what an engine can stand in for: {exc}") from exc
    found.check()
    return found

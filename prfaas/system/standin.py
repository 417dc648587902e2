"""A model's profile as engines that stand in for it: its times and the size of its KVCache, scaled to one machine.

What is measured here is what the model would show, times the scales:

    seconds of here = seconds × time_scale      tokens of here = tokens × token_scale      bytes of here = bytes × byte_scale
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from engine.byte_tokenizer import save_byte_tokenizer
from engine.emulated.standin import StandIn, StandInWindow
from engine.errors import ModelError
from engine.runtime.scheduler import MAX_RUNNING
from membership.lines import BYTES_PER_S_PER_GBPS
from planner.errors import InputError
from planner.model.profile import ModelProfile, load_profile
from prfaas.errors import TopologyError
from transport.control.settings import require

CURVE_POINTS: Final = 513  # every 256 tokens of 131,072: a quadratic between two of them is a straight line
CONTEXT_TOKENS: Final = 32768


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much smaller everything is here; 1 is the real thing."""

    time: float = 1.0
    tokens: float = 1.0
    bytes: float = 1.0

    def __post_init__(self) -> None:
        for name, value in (("time", self.time), ("token", self.tokens), ("byte", self.bytes)):
            require(0 < value <= 1e6, f"{name}_scale", value, "a number above 0")

    def bytes_per_s(self, gbps: float) -> float:
        """What a link of `gbps` carries here."""
        return gbps * BYTES_PER_S_PER_GBPS * self.bytes / self.time

    def tokens_of(self, tokens: float) -> int:
        """At least one."""
        return max(1, round(tokens * self.tokens))


def stand_in(profile: ModelProfile, hardware: str, scale: Scale) -> StandIn:
    """`profile` on `hardware`, at a smaller scale. Hardware without a decode profile only prefills. Raises InputError."""
    kv, curve, decode = profile.kv_size(), profile.prefill_on(hardware), profile.decode.get(hardware)
    tokens = np.linspace(0.0, curve.valid_tokens[1], CURVE_POINTS)
    seconds = np.maximum.accumulate(np.maximum(curve.of(tokens), 0.0))
    points = zip((tokens * scale.tokens).tolist(), (seconds * scale.time).tolist(), strict=True)
    return StandIn(
        model=profile.model,
        fixed_bytes=round(kv.fixed_bytes * scale.bytes),
        bytes_per_token=round(kv.bytes_per_token * scale.bytes / scale.tokens),
        windows=tuple(
            StandInWindow(scale.tokens_of(each.window_tokens), round(each.bytes_per_token * scale.bytes / scale.tokens))
            for each in kv.windows
        ),
        prefill_points=tuple(points),
        max_running=decode.max_running if decode else MAX_RUNNING,
        step_s=decode.step_s * scale.time if decode else 0.0,
        step_s_per_request=decode.step_s_per_request * scale.time if decode else 0.0,
        steps_per_token=1 / scale.tokens,
    )


def write_stand_ins(profile: Path, scale: Scale, directory: Path) -> None:
    """One file per kind of hardware, and a tokenizer. Raises TopologyError."""
    try:
        model = load_profile(profile)
        model.kv_size()
        directory.mkdir(parents=True, exist_ok=True)
        for hardware in model.prefill:
            found = stand_in(model, hardware, scale)
            found.check()
            stand_in_file(directory, hardware).write_bytes(msgspec.json.encode(found))
        save_byte_tokenizer(directory, CONTEXT_TOKENS)
    except (InputError, ModelError, OSError) as exc:
        raise TopologyError(f"[model]: profile = {str(profile)!r}: {exc}") from exc


def stand_in_file(directory: Path, hardware: str) -> Path:
    """Where `write_stand_ins` puts it."""
    return directory / f"{hardware}.json"

"""T_prefill from NVIDIA's aiconfigurator, where it is installed.

Its estimates leave out a fixed cost per request: against published 8×H200 numbers 0.33–0.45 s is missing, so short prompts come
out up to 17 times too fast and a threshold far too low. The import adds SERVING_OVERHEAD_S; calibrate on measured points.
"""

from importlib import import_module
from typing import Final

from planner.errors import InputError
from planner.model.profile import PrefillCurve

SERVING_OVERHEAD_S: Final = 0.36
LENGTHS: Final = (1_000, 8_000, 32_000, 128_000)


def import_curve(model_path: str | None, system: str, tensor_parallel: int = 8) -> PrefillCurve:
    """Estimates at four lengths, about a second each. Raises InputError when the tool is missing or knows no answer."""
    if not model_path:
        raise InputError("model_path: missing; give --model-path NAME or a directory with config.json")
    try:
        cli_estimate = import_module("aiconfigurator.cli.api").cli_estimate
    except ImportError as exc:
        raise InputError("aiconfigurator is not installed: pip install aiconfigurator (850 MB)") from exc
    points = []
    for length in LENGTHS:
        try:
            estimate = cli_estimate(
                model_path=model_path, system_name=system, backend_name="sglang", mode="static_ctx", isl=length, osl=2,
                batch_size=1, tp_size=tensor_parallel, moe_tp_size=1, moe_ep_size=tensor_parallel,
            )  # fmt: skip
        except (ValueError, RuntimeError, KeyError) as exc:
            raise InputError(f"aiconfigurator has no estimate for {model_path} on {system} at {length}: {exc}") from exc
        points.append((float(length), estimate.ttft / 1000))
    return PrefillCurve(
        points=tuple(points),
        valid_tokens=(LENGTHS[0], LENGTHS[-1]),
        overhead_s=SERVING_OVERHEAD_S,
        provenance=f"unverified: aiconfigurator, sglang on {system}, TP{tensor_parallel}, plus {SERVING_OVERHEAD_S} s",
    )

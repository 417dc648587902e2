"""Whether figures can belong together: nothing is faster than its GPUs, and nothing larger than their memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.errors import InputError
from planner.model.memory import MemoryProfile
from planner.model.profile import KvSize
from planner.profiles.curves import TimedLength
from planner.profiles.mixers import ModelLayer
from planner.profiles.results.run import BenchmarkRun
from planner.profiles.weights import WeightCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastWork:
    """The arithmetic of a prefill that no engine can leave out."""

    counts: WeightCounts
    layers: Sequence[ModelLayer]

    def flops(self, num_tokens: float) -> float:
        """Two operations for each weight and token, and attention over all pairs of tokens."""
        attention = sum(mixer.flops(num_tokens) for layer in self.layers for mixer in layer.mixers)
        return 2.0 * self.counts.used * num_tokens + attention


def check_prefills(timed: Sequence[TimedLength], work: LeastWork, peak_flops: float, hardware: str) -> None:
    """Raises InputError for a prefill that the GPUs cannot have computed in its time."""
    for point in timed:
        least_s = work.flops(point.tokens) / peak_flops
        if point.seconds < least_s:
            raise InputError(
                f"prefill: {point.seconds:.3g} s for {point.tokens:,.0f} tokens ({point.source}) is less than the "
                f"{least_s:.3g} s that {hardware} takes at its peak of {peak_flops / 1e15:.3g} PFLOP/s: were prompts cached "
                "(turn the prefix cache off), or is it other hardware (--gpu, --gpus) or another model?"
            )


def check_batches(runs: Sequence[BenchmarkRun], kv: KvSize, memory: MemoryProfile) -> None:
    """Raises InputError for a run with more KVCache than all memory beside the weights."""
    room = memory.gpus * memory.hbm_bytes_per_gpu - memory.weights_bytes
    for run in runs:
        needed = run.decoding * memory.needed_bytes(kv(run.context_tokens), kv.fixed_bytes)
        if needed > room:
            raise InputError(
                f"decode: {run.decoding:.0f} requests at once with {run.context_tokens:,.0f} tokens each ({run.source}) need "
                f"{needed / 1e9:,.0f} GB of KVCache, and beside the weights there are {room / 1e9:,.0f} GB: is it other hardware "
                "(--gpu, --gpus), smaller numbers (--kv-dtype), or fewer copies (--kv-copies)?"
            )

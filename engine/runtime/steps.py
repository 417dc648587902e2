"""Recent durations of decode steps, by the number of sequences in them. Nodes report them."""

from typing import Final

FADE: Final = 1 / 32  # weight of a new step, once there are enough
LARGEST: Final = 12  # sizes are kept by octave: 1, 2-3, 4-7, ...; the last octave takes whatever is larger

Steps = tuple[tuple[float, float], ...]
"""(mean number of sequences, mean seconds), by rising number."""


class StepTimes:
    """Written by the thread that decodes and read by any: nothing in it ever changes its size."""

    def __init__(self) -> None:
        self._octaves: list[tuple[int, float, float] | None] = [None] * LARGEST  # samples, mean batch, mean seconds

    def note(self, batch: int, seconds: float) -> None:
        """Records a step of `batch` sequences. A duration of 0 means that it was not measured."""
        if batch < 1 or seconds <= 0:
            return
        octave = min(batch.bit_length(), LARGEST) - 1
        samples, mean_batch, mean_s = self._octaves[octave] or (0, 0.0, 0.0)
        weight = max(FADE, 1 / (samples + 1))
        mean_batch += weight * (batch - mean_batch)
        self._octaves[octave] = samples + 1, mean_batch, mean_s + weight * (seconds - mean_s)

    def report(self) -> Steps:
        return tuple((batch, seconds) for _, batch, seconds in filter(None, self._octaves))

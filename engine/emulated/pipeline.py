"""Chunked pipeline parallelism by the clock (Mooncake §4.1): when each of N stages computes its layers of a chunk.

    stage 0 | chunk 0 | chunk 1 | chunk 2 |
    stage 1           | chunk 0 | chunk 1 | chunk 2 |

A stage begins a chunk when two things are done: the stage before has finished the chunk, and this stage the chunk
before, of any prompt. C equal chunks of T seconds each, every stage having an Nth of a chunk's work, are through after
(C + N - 1) · T / N.
"""

import math
from dataclasses import dataclass

NEARLY = 1e-9  # of a stage: a layer that ends a stage is not the next one's


@dataclass(frozen=True, slots=True)
class Passage:
    """A chunk's way: when each stage begins with it, and how long each takes, in seconds."""

    begins_s: tuple[float, ...]
    stage_s: float

    def end_s(self, stage: int) -> float:
        return self.begins_s[stage] + self.stage_s

    def done_s(self, depth: float) -> float:
        """When the first `depth` of the layers, a share above 0 and up to 1, have been computed."""
        at = depth * len(self.begins_s)
        stage = min(max(math.ceil(at - NEARLY) - 1, 0), len(self.begins_s) - 1)
        return self.begins_s[stage] + min(at - stage, 1.0) * self.stage_s


class EmulatedPipeline:
    """The work of the stages. Pure: times are given, in seconds."""

    def __init__(self, stages: int) -> None:
        self._free_s = [-math.inf] * stages

    @property
    def ready_s(self) -> float:
        """When the first stage takes the next chunk; -inf before the first."""
        return self._free_s[0]

    def take(self, now: float, chunk_s: float) -> Passage:
        """A chunk that comes in now, of `chunk_s` seconds over all stages."""
        stage_s, at, begins = chunk_s / len(self._free_s), now, []
        for stage, free_s in enumerate(self._free_s):
            at = max(at, free_s)
            begins.append(at)
            at += stage_s
            self._free_s[stage] = at
        return Passage(tuple(begins), stage_s)

    def clear(self, now: float) -> None:
        """Drops the stages' work: they are free."""
        self._free_s = [min(free_s, now) for free_s in self._free_s]

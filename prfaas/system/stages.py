"""How far an engine's start is, read off its log, for users who wait for minutes."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

# What a log says when a stage begins, latest stage last; vLLM's words and those of what it stands on, then SGLang's.
STAGES: Final = (
    ("Initializing a V1 LLM engine", "starts its processes"),
    ("Starting to load model", "loads weights"),
    ("Model loading took", "has its weights, measures memory"),
    ("KV cache size", "has its KVCache"),
    ("torch.compile takes", "compiles"),
    ("Capturing CUDA graphs", "captures CUDA graphs"),
    ("init engine", "starts its server"),
    ("Load weight begin", "loads weights"),
    ("Load weight end", "has its weights"),
    ("Memory pool end", "has its KVCache, starts its server"),
)
FIRST: Final = "starts"
MOST_BYTES: Final = 1 << 20  # of a log that are read: one that is longer has begun
EVERY_S: Final = 15.0


def stage_of(log: str) -> str:
    """The last stage that the log of a start tells of."""
    return next((stage for words, stage in reversed(STAGES) if words in log), FIRST)


class Progress:
    """Tells of one node's start: each new stage, and every so often that it goes on."""

    def __init__(self, name: str, engine_log: Path, report: Callable[[str], None], now: Callable[[], float]) -> None:
        self._name = name
        self._engine_log = engine_log
        self._report = report
        self._now = now
        self._began = self._told_at = now()
        self._stage = FIRST

    def look(self) -> None:
        """Says what there is to say; to be called now and then."""
        stage, now = stage_of(self._text()), self._now()
        if stage == self._stage and now - self._told_at < EVERY_S:
            return
        self._stage, self._told_at = stage, now
        self._report(f"  {self._name:<10} {now - self._began:4.0f} s: its engine {stage}")

    def _text(self) -> str:
        try:
            with self._engine_log.open("rb") as file:
                return file.read(MOST_BYTES).decode(errors="replace")
        except OSError:  # it has not been begun
            return ""

"""What parts of `python -m tests.gpu` come to, and how long there is for them."""

import json
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class PartResult:
    """What became of a part, or of one model of it: "passed", "failed" or "skipped"."""

    part: str
    outcome: str
    reason: str
    figures: dict[str, Any]
    model: str = ""


def judged(part: str, reasons: list[str], figures: dict[str, Any], model: str = "") -> PartResult:
    """`reasons`: why it has failed."""
    return PartResult(part, "failed" if reasons else "passed", "; ".join(reasons), figures, model)


def skipped(part: str, reason: str, model: str = "") -> PartResult:
    return PartResult(part, "skipped", reason, {}, model)


@dataclass(frozen=True)
class TimeBudget:
    """How long a run may take, from `began_s` on."""

    limit_s: float
    began_s: float

    def left_s(self, now: float) -> float:
        return max(0.0, self.began_s + self.limit_s - now)

    def shortage(self, needed_s: float, now: float) -> str:
        """Why what takes `needed_s` no longer fits; empty if it does."""
        left_s = self.left_s(now)
        return "" if left_s >= needed_s else f"{left_s:.0f} of {self.limit_s:.0f} s are left, {needed_s:.0f} are wanted"


class Report:
    """The results so far. The file has each at once: a run that is killed loses none."""

    def __init__(self, device: str, budget: TimeBudget, path: Path | None = None) -> None:
        self.budget = budget
        self.results: list[PartResult] = []
        self._awaited: list[tuple[str, str]] = []
        self._device = device
        self._path = path
        self._lock = threading.Lock()

    def left_s(self) -> float:
        return self.budget.left_s(time.monotonic())

    def say(self, line: str) -> None:
        print(f"{self._seconds():6.1f} s  {line}", flush=True)

    def awaits(self, part: str, model: str = "") -> None:
        """There is to be a result of that part, and of that model."""
        self._awaited.append((part, model))

    def cut(self) -> None:
        """Of what is awaited still, nothing will come."""
        for part, model in self._awaited:
            if not any((part, model) == (result.part, result.model) for result in [*self.results]):
                self.add(judged(part, [f"it had not ended {self._seconds():.0f} s after the beginning"], {}, model))

    def add(self, result: PartResult) -> None:
        with self._lock:
            self.results.append(result)
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.write_text(self._text())
        self.say(" ".join(filter(None, (result.part, result.model))) + f": {result.outcome} {result.reason}")

    def text(self) -> str:
        with self._lock:
            return self._text()

    @property
    def has_failed(self) -> bool:
        return any(result.outcome == "failed" for result in self.results)

    def _text(self) -> str:
        parts = [asdict(result) for result in self.results]
        return json.dumps({"device": self._device, "seconds": round(self._seconds(), 1), "parts": parts}, indent=1)

    def _seconds(self) -> float:
        return time.monotonic() - self.budget.began_s

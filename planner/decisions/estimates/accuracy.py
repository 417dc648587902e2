"""Tracks the relative errors of the latest predictions, in bounded memory."""

from collections import deque
from dataclasses import dataclass
from typing import Final

ERRORS_KEPT: Final = 256
LEAST: Final = 1e-6  # what is smaller was not measured, and no prediction of it is wrong


@dataclass(frozen=True, slots=True)
class Error:
    """Relative errors |predicted / seen − 1| of late predictions, each made before its sample was learned from."""

    mean: float = 0.0
    p90: float = 0.0
    samples: int = 0


class Accuracy:
    """The latest predictions of one kind, beside what was seen."""

    def __init__(self) -> None:
        self._errors: deque[float] = deque(maxlen=ERRORS_KEPT)

    def note(self, predicted: float, seen: float) -> None:
        """`predicted` turned out to be `seen`, in the same unit."""
        if seen >= LEAST:
            self._errors.append(abs(predicted / seen - 1.0))

    @property
    def error(self) -> Error:
        if not self._errors:
            return Error()
        ordered = sorted(self._errors)
        return Error(sum(ordered) / len(ordered), ordered[int(0.9 * (len(ordered) - 1))], len(ordered))

"""What the workers of a gateway have counted, added up by the names under which it is written, before any name is read.

Workers count under the same names: 16 times as many names to read took most of the time that a page of metrics took.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

Read = Callable[[str], Iterable[tuple[str, float, float, int]]]
LabelledValue = tuple[Mapping[str, str], float]
COUNTER: Final = "counter"


def added_up(directory: Path, read: Read, files: str = "*.db") -> dict[str, dict[str, float]]:
    """By kind of instrument, then by name: the sums of the values that `read` finds in the files of `directory`."""
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for path in directory.glob(files):
        kind = path.name.partition("_")[0]
        of_kind = sums[kind]
        try:
            for name, value, *_ in read(str(path)):
                of_kind[name] += value
        except FileNotFoundError:  # its worker has ended since
            continue
    return sums


class CountersInFiles:
    """Some counters alone: they are read every few seconds, and a whole page takes long."""

    def __init__(self, directory: Path, read: Read, begin: str) -> None:
        """Those whose names in files begin with `begin`."""
        self._directory = directory
        self._read = read
        self._begin = begin
        self._known: dict[str, tuple[str, Mapping[str, str]]] = {}  # what these names say

    def series(self) -> dict[str, list[LabelledValue]]:
        """By family."""
        sums = added_up(self._directory, self._read, f"{COUNTER}_*.db").get(COUNTER, {})
        found: dict[str, list[LabelledValue]] = defaultdict(list)
        known: dict[str, tuple[str, Mapping[str, str]]] = {}
        for name, value in sums.items():
            if name.startswith(self._begin):
                family, labels = known[name] = self._known.get(name) or _said(name)
                found[family].append((labels, value))
        self._known = known
        return found


def _said(name: str) -> tuple[str, Mapping[str, str]]:
    family, _, labels, _ = json.loads(name)
    return family, labels

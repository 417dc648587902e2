"""How an instrument of Prometheus is declared: a row in the body of the class that counts with it.

    class Metrics:
        _requests = counters("prfaas_requests", "Finished requests", "route", "status")

        def __init__(self, registry):
            build_instruments(self, registry)

A row is a frozen value. `build_instruments` puts the instrument itself in its place, on each object of the class.

A gateway's instruments live in files, which outlive their process (`FileValues`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from threading import Lock
from typing import Any, Final, Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.mmap_dict import MmapedDict, mmap_key

MOST_SERIES: Final = 16_384  # of one metric; reloads may bring new tenants for ever

WRITTEN: Final = Struct("dd")  # a value, and when it was set (0: no matter)

M = TypeVar("M", bound=MetricWrapperBase)
Built = TypeVar("Built")


class Children(dict[tuple[str, ...], M]):
    """The children of a metric by the values of its labels, each looked up once; from `most` on one for all."""

    def __init__(self, metric: M, *, most: int = MOST_SERIES) -> None:
        super().__init__()
        self._metric = metric
        self._most = most

    def __missing__(self, values: tuple[str, ...]) -> M:
        if len(self) >= self._most:
            values = ("other",) * len(values)
        child = self[values] = self._metric.labels(*values)
        return child


@dataclass(frozen=True, kw_only=True)
class Instrument(Generic[Built]):
    """A declared instrument: what it is called, what it tells, and by which labels."""

    kind: type[MetricWrapperBase]
    name: str
    what: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # of a histogram

    def __get__(self, owner: object, of: type | None = None) -> Built:
        """For types alone: what is built lies on the object, and is found there first."""
        raise AttributeError(f"{self.name} is declared, but not built")

    def build(self, registry: CollectorRegistry) -> Any:
        """The instrument, or its children where it has labels."""
        more: dict[str, Any] = {"buckets": self.buckets} if self.buckets else {}
        if self.kind is Gauge:  # of all workers together
            more["multiprocess_mode"] = "livesum"
        metric = self.kind(self.name, self.what, self.labels, registry=registry, **more)
        return Children(metric) if self.labels else metric


def counters(name: str, what: str, *labels: str) -> Instrument[Children[Counter]]:
    """Counters, by the values of their labels."""
    return Instrument(kind=Counter, name=name, what=what, labels=labels)


def gauge(name: str, what: str) -> Instrument[Gauge]:
    """One gauge. Workers' values are added up."""
    return Instrument(kind=Gauge, name=name, what=what)


def gauges(name: str, what: str, *labels: str) -> Instrument[Children[Gauge]]:
    """Gauges, by the values of their labels."""
    return Instrument(kind=Gauge, name=name, what=what, labels=labels)


def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Instrument[Histogram]:
    """One histogram."""
    return Instrument(kind=Histogram, name=name, what=what, buckets=buckets)


def histograms(name: str, what: str, *labels: str, buckets: tuple[float, ...]) -> Instrument[Children[Histogram]]:
    """Histograms, by the values of their labels."""
    return Instrument(kind=Histogram, name=name, what=what, labels=labels, buckets=buckets)


def build_instruments(owner: object, registry: CollectorRegistry) -> None:
    """Builds all that the class of `owner` declares, in the order of its rows."""
    for kind in reversed(type(owner).mro()):
        for attribute, declared in vars(kind).items():
            if isinstance(declared, Instrument):
                setattr(owner, attribute, declared.build(registry))


class FileValue:
    """A number of an instrument, in a file of its process. It stays there when the process has ended.

    The library's own value asks at each update which process it is in, and looks its place up by name. A request makes
    a dozen updates.
    """

    def __init__(self, file: MmapedDict, name: str, lock: Lock) -> None:
        """Goes on from what the file says."""
        self._file = file
        self._lock = lock
        value, _ = file.read_value(name)  # type: ignore[no-untyped-call]
        self._value: float = value
        at: int = file._positions[name]  # for as long as the file lives
        self._cells = slice(at, at + WRITTEN.size)

    def inc(self, amount: float) -> None:
        with self._lock:
            self._value += amount
            self._file._m[self._cells] = WRITTEN.pack(self._value, 0.0)  # at once: no reader sees a part of it

    def set(self, value: float, timestamp: float | None = None) -> None:
        with self._lock:
            self._value = value
            self._file._m[self._cells] = WRITTEN.pack(value, timestamp or 0.0)

    def get(self) -> float:
        with self._lock:
            return self._value

    def set_exemplar(self, exemplar: object) -> None:
        """Files have no room for them."""

    def get_exemplar(self) -> None:
        return None


class FileValues:
    """Makes the values of process `worker`, as the library asks for them, in a file of `directory` for each kind."""

    def __init__(self, directory: Path, worker: int) -> None:
        self._directory = directory
        self._worker = worker
        self._files: dict[str, MmapedDict] = {}
        self._lock = Lock()

    def __call__(
        self,
        kind: str,
        metric: str,
        name: str,
        labels: Sequence[str],
        values: Sequence[str],
        what: str,
        multiprocess_mode: str = "",
        **_: object,
    ) -> FileValue:
        kind = f"{kind}_{multiprocess_mode}" if kind == "gauge" else kind
        with self._lock:
            if kind not in self._files:
                path = str(self._directory / f"{kind}_{self._worker}.db")
                self._files[kind] = MmapedDict(path)  # type: ignore[no-untyped-call]
            return FileValue(self._files[kind], mmap_key(metric, name, list(labels), list(values), what), self._lock)

    def close(self) -> None:
        """Lets go of the files. Nothing may be counted any more."""
        for file in self._files.values():
            file.close()  # type: ignore[no-untyped-call]

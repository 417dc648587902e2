"""A fleet whose registry lies in memory, and whose counts are known: what each run has written."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from gateway.fleet.errors import FleetFailed
from gateway.fleet.usage.board import LocalUsageBoard, UsageBoard
from gateway.fleet.usage.counts import Counts, accounts_of, counts_of, summed
from gateway.fleet.usage.documents import folded_read, run_read
from gateway.fleet.usage.keeper import FleetUsage, UsageClocks, UsageStore
from gateway.fleet.usage.runs import FoundUsage, StoredValue
from gateway.telemetry.tenant_usage import TenantUsage

EPOCH_S = 1_800_000_000
STEP_S = 100.0  # between looks, where time passes


class MemoryUsage:
    """As etcd has it. `fails`: `none`, `down`, `answer` (taken, and not said), `request` (not taken)."""

    def __init__(self) -> None:
        self.found = FoundUsage()
        self.revision = 1
        self.fails = "none"
        self.on_written: Callable[[], None] = lambda: None
        self.on_read: Callable[[], bool] = lambda: True

    def read(self, own: str = "") -> FoundUsage:
        if self.fails == "down":
            raise FleetFailed("unreachable", "it does not answer")
        found = self.found
        self.on_read()  # the answer may take its time
        return found

    def write(self, run: str, value: bytes, found: FoundUsage) -> bool:
        return self._changed([run], found, self.found.folded, {run: self._stored(value)}, self.on_written)

    def fold(self, runs: Collection[str], folded: bytes, found: FoundUsage) -> bool:
        return self._changed(runs, found, self._stored(folded), {}, lambda: None)

    def close(self) -> None:
        """Others go on."""

    def _stored(self, value: bytes) -> StoredValue:
        return StoredValue(value, self.revision + 1)

    def _changed(
        self,
        runs: Collection[str],
        found: FoundUsage,
        folded: StoredValue,
        instead: dict[str, StoredValue],
        on_changed: Callable[[], None],
    ) -> bool:
        if self.fails in ("down", "request"):
            raise FleetFailed("unreachable", "it does not answer")
        now = self.found
        if now.folded != found.folded or any(now.runs.get(run) != found.runs.get(run) for run in runs):
            return False
        others = {name: each for name, each in now.runs.items() if name not in runs}
        self.found = replace(now, folded=folded, runs=others | instead)
        self.revision += 1
        on_changed()
        if self.fails == "answer":
            raise FleetFailed("unreachable", "no answer")
        return True


@dataclass(eq=False)
class OnDuty:
    """It is, until it gives that up."""

    is_ours: bool = True

    def __call__(self) -> bool:
        return self.is_ours

    def give_up(self) -> None:
        self.is_ours = False


@dataclass(eq=False)
class HeardTelemetry:
    """What was said."""

    failures: list[str] = field(default_factory=list)
    num_bytes: dict[str, int] = field(default_factory=dict)
    runs: int = 0
    read_unix_s: float = 0.0

    def fleet_failed(self, about: str, reason: str) -> None:
        assert about == "usage"
        self.failures.append(reason)

    def usage_moved(self, way: str, size: int) -> None:
        self.num_bytes[way] = self.num_bytes.get(way, 0) + size

    def usage_read(self, runs: int, unix_s: float) -> None:
        self.runs, self.read_unix_s = runs, unix_s


@dataclass(eq=False)
class CountingGateway:
    """One run: its counters, and the process that speaks for it now."""

    name: str
    fleet: "UsageFleet"
    store: UsageStore
    board: UsageBoard = field(default_factory=LocalUsageBoard)
    counts: dict[tuple[str, str, str, str], int] = field(default_factory=dict)
    read: Counts = field(default_factory=dict)  # of its counters, for the last write
    heard: HeardTelemetry = field(default_factory=HeardTelemetry)

    duty: OnDuty = field(default_factory=OnDuty)

    def __post_init__(self) -> None:
        self.usage = self.begun()

    def begun(self) -> FleetUsage:
        clocks = UsageClocks(now=lambda: self.fleet.now, unix_s=lambda: EPOCH_S + self.fleet.now)
        return FleetUsage(self.name, self.store, self.board, self._counted, clocks, self.heard, self.duty)

    def follow(self) -> None:
        """Another process of the same gateway speaks for it."""
        self.usage = self.begun()

    def count(self, tenant: str, requests: int, sent: int = 0) -> None:
        for series, count in (
            ((tenant, "requests_200", "", ""), requests),
            ((tenant, "kv_bytes_request", "east", "west"), sent),
        ):
            if count:
                self.counts[series] = self.counts.get(series, 0) + count

    def step(self, has_ended: bool = False) -> bool:
        """Whether the registry answered."""
        self.fleet.stepping = self
        try:
            self.usage.step(has_ended)
        except FleetFailed:
            return False
        return True

    def _counted(self) -> list[TenantUsage]:
        self.read = dict(self.counts)
        return accounts_of(self.counts)


class UsageFleet:
    """Gateways and their registry. `written` is what each run that ever was has had taken."""

    def __init__(self, gateways: int, store: MemoryUsage | None = None) -> None:
        self.now = 1000.0
        self.registry = store or MemoryUsage()
        self.registry.on_written = self._on_written
        self.written: dict[CountingGateway, Counts] = {}
        self.stepping: CountingGateway | None = None
        self.gateways = [CountingGateway(f"g{number}", self, self.registry) for number in range(gateways)]

    def kill(self, number: int) -> None:
        """It is gone, and another one begins in its place."""
        self.gateways[number] = CountingGateway(f"g{number}", self, self.registry)

    def end(self, number: int) -> None:
        self.gateways[number].step(has_ended=True)
        self.kill(number)

    def passes(self, seconds: float, silent: int | None = None) -> None:
        """Time passes, and all look, but one."""
        until = self.now + seconds
        while self.now < until:
            self.now += STEP_S
            for number, each in enumerate(self.gateways):
                if number != silent:
                    each.step()

    @property
    def taken(self) -> Counts:
        """What all runs have had taken."""
        return summed(self.written.values())

    @property
    def stored(self) -> Counts:
        """What lies in the registry."""
        found = self.registry.found
        folded = [folded_read(found.folded.value).counts] if found.folded.revision else []
        return summed([*folded, *(run_read(name, each.value).counts for name, each in found.runs.items())])

    def told(self, number: int) -> Counts:
        return counts_of(self.gateways[number].usage.report().data)

    def _on_written(self) -> None:
        assert self.stepping is not None
        self.written[self.stepping] = self.stepping.read

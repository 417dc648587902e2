"""Usage in etcd: a key for each run of a gateway, and one for the sum of those that have ended.

PREFIX/gateways/usage/folded     comes before the runs: it is read however many they are
PREFIX/gateways/usage/runs/ID
"""

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from gateway.fleet.errors import FleetFailed
from gateway.fleet.usage.documents import MAX_NAME_CHARS
from gateway.fleet.usage.runs import NOTHING, FoundUsage, StoredValue
from membership.errors import EtcdFailed
from membership.etcd.client import EtcdClient
from membership.etcd.pages import BEGIN_S, pages
from membership.etcd.settings import EtcdConfig
from transport.control.proto.etcd_pb2 import Compare, DeleteRangeRequest, PutRequest, RequestOp, TxnRequest

USAGE: Final = "usage/"
FOLDED: Final = "folded"
RUNS: Final = "runs/"
MOST_RUNS: Final = 1024  # that are read; gateways fold those that have ended, and so see the next
MOST_BYTES: Final = 64 << 20  # of them together


class EtcdUsage:
    """That of one fleet. Every method blocks, and raises FleetFailed."""

    def __init__(self, config: EtcdConfig, client: EtcdClient | None = None, read_s: float = BEGIN_S) -> None:
        """Everything is read within `read_s`."""
        self._root = f"{config.fleet_root}{USAGE}"
        self._client = client or EtcdClient(config)
        self._read_s = read_s

    def read(self, own: str = "") -> FoundUsage:
        """All of one revision; run `own` however many there are."""
        folded, runs = NOTHING, dict[str, StoredValue]()
        revision = num_bytes = 0
        with _told():
            for page in pages(self._client, self._root, time.monotonic() + self._read_s):
                revision = revision or page.header.revision
                for kv in page.kvs:
                    name = kv.key.decode(errors="backslashreplace").removeprefix(self._root)
                    if name == FOLDED:
                        folded = StoredValue(kv.value, kv.mod_revision)
                    elif name.startswith(RUNS) and len(name) <= MAX_NAME_CHARS:
                        num_bytes += len(kv.value)
                        if len(runs) == MOST_RUNS or num_bytes > MOST_BYTES:
                            return FoundUsage(folded, runs | self._run(own, revision), is_cut=True)
                        runs[name.removeprefix(RUNS)] = StoredValue(kv.value, kv.mod_revision)
        return FoundUsage(folded, runs)

    def write(self, run: str, value: bytes, found: FoundUsage) -> bool:
        """Changes a run. False: it, or the sum, is no longer what was found."""
        put = RequestOp(request_put=PutRequest(key=self._key(f"{RUNS}{run}"), value=value))
        return self._transacted([run], found, [put])

    def fold(self, runs: Collection[str], folded: bytes, found: FoundUsage) -> bool:
        """Changes the sum, and removes the runs that it has now. False: as above."""
        changes = [
            RequestOp(request_put=PutRequest(key=self._key(FOLDED), value=folded)),
            *(RequestOp(request_delete_range=DeleteRangeRequest(key=self._key(f"{RUNS}{run}"))) for run in runs),
        ]
        return self._transacted(runs, found, changes)

    def close(self) -> None:
        """For good."""
        self._client.close()

    def _run(self, name: str, revision: int) -> dict[str, StoredValue]:
        for kv in self._client.range(self._key(f"{RUNS}{name}"), revision=revision).kvs:
            return {name: StoredValue(kv.value, kv.mod_revision)}
        return {}

    def _transacted(self, runs: Collection[str], found: FoundUsage, changes: Sequence[RequestOp]) -> bool:
        revisions = {f"{RUNS}{run}": found.runs.get(run, NOTHING).revision for run in runs}
        revisions[FOLDED] = found.folded.revision
        same = [
            Compare(result=Compare.EQUAL, target=Compare.MOD, key=self._key(name), mod_revision=revision)
            for name, revision in revisions.items()
        ]
        with _told():
            return bool(self._client.transact(TxnRequest(compare=same, success=changes)).succeeded)

    def _key(self, name: str) -> bytes:
        return f"{self._root}{name}".encode()


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except EtcdFailed as failure:
        raise FleetFailed(failure.reason, str(failure)) from failure

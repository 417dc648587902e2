"""The right to lead, the ledger and the audit log in etcd, for services on several hosts.

PREFIX/plans/state/leader     of the one that leads, under a lease that ends with it
PREFIX/plans/state/ledger     changed only by the one that leads, and only as it has last seen it
PREFIX/plans/state/entries    how many lines the log has had
PREFIX/plans/audit/NUMBER     a line of the log; the last MOST_ENTRIES are kept

The leader counts its lease from before it asked for it, so its own clock ends it before etcd's does. Where an answer is
lost, etcd may have taken a change or not. If it has, the next change is refused: the ledger is not the one that was last
seen. The service that leads next reads it again.
"""

import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Final, TypeVar

import msgspec

from membership.errors import EtcdFailed
from membership.etcd.client import EtcdClient
from membership.etcd.pages import key_range
from membership.etcd.settings import EtcdConfig
from planner.errors import Deposed, InputError
from planner.solve.control.ledger import Ledger, LedgerEntry
from transport.control.proto.etcd_pb2 import (
    Compare,
    DeleteRangeRequest,
    EtcdKeyValue,
    PutRequest,
    RequestOp,
    TxnRequest,
)

T = TypeVar("T")

LEASE_S: Final = 10.0
CALL_S: Final = 2.0  # of etcd, for all endpoints together
MOST_ENTRIES: Final = 1000
PAGE_ENTRIES: Final = 20
MAX_LEDGER_BYTES: Final = 1 << 20  # etcd takes 1.5 MiB
MAX_URL_CHARS: Final = 512
NO_LEASE: Final = 0
MAY_BE_A_COUNT: Final = re.compile(rb"\d{1,16}").fullmatch


class PlanLeader(msgspec.Struct, frozen=True, kw_only=True):
    """The service that leads: a random id of its process, and where it is asked."""

    process: Annotated[str, msgspec.Meta(max_length=64)]
    url: Annotated[str, msgspec.Meta(max_length=MAX_URL_CHARS)]


@dataclass(frozen=True, slots=True)
class PlansFound:
    """What etcd says at one moment. No `ledger`: there has never been one."""

    ledger: Ledger | None
    leader: PlanLeader | None


class PlansInEtcd:
    """What one service sees and changes there. Methods block; all raise OSError where etcd does not do as it is asked."""

    def __init__(
        self,
        config: EtcdConfig,
        process: str,
        client: EtcdClient | None = None,
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client or EtcdClient(config, call_s=CALL_S)
        self._root = config.plans_root
        self._process = process
        self._lease_s = lease_s
        self._clock = clock
        self._lease = NO_LEASE
        self._until = float("-inf")
        self._led_since = 0  # the revision that made this process the leader; 0: it does not lead
        self._seen_at = 0  # that of the ledger; 0: etcd has not got one
        self._next_entry = 0
        self._one_write = threading.Lock()

    @property
    def leads(self) -> bool:
        """Whether no other service can lead now."""
        return self._led_since > 0 and self._clock() < self._until

    @property
    def renew_s(self) -> float:
        """Between two renewals of the lease."""
        return self._lease_s / 4

    def look(self) -> PlansFound:
        """What there is. Raises InputError for a ledger that is damaged."""
        begin, end = key_range(f"{self._root}state/")
        found = {bytes(kv.key): kv for kv in self._asked(lambda: self._client.range(begin, end, limit=3).kvs)}
        ledger, leader = found.get(self._key("state/ledger")), found.get(self._key("state/leader"))
        return PlansFound(self._decoded(ledger), _leader(leader))

    def campaign(self, url: str) -> Ledger | None:
        """Leads if no other service does: the ledger to go on with, a blank one at first. None: another one leads.

        Where it raises, `resign` lets another one lead at once.
        """
        began = self._clock()
        lease = self._lease = self._asked(lambda: self._client.grant(self._lease_s))
        document = msgspec.json.encode(PlanLeader(process=self._process, url=url[:MAX_URL_CHARS]))
        key = self._key("state/leader")
        is_free = Compare(result=Compare.EQUAL, target=Compare.CREATE, key=key, create_revision=0)
        ours = RequestOp(request_put=PutRequest(key=key, value=document, lease=lease))
        self._transacted([is_free], [ours])
        held = self._found("state/leader")  # an answer may have been lost, and the change not
        if held is None or held.lease != lease:
            with suppress(OSError):  # it may have lapsed meanwhile
                self.resign()
            return None
        ledger = self._found("state/ledger")
        decoded = self._decoded(ledger) or Ledger()
        self._seen_at = ledger.mod_revision if ledger is not None else 0
        self._next_entry = self._num_entries()
        self._until, self._led_since = began + self._lease_s, held.create_revision
        return decoded

    def renew(self) -> None:
        """Leads on, if it still does."""
        began = self._clock()
        lease = self._lease
        if lease != NO_LEASE and self._asked(lambda: self._client.keep_alive(lease)):
            self._until = began + self._lease_s
        elif self._lease == lease:
            self._led_since = 0

    def resign(self) -> None:
        """Another one may lead at once."""
        lease, self._lease, self._led_since = self._lease, NO_LEASE, 0
        if lease != NO_LEASE:
            self._asked(lambda: self._client.revoke(lease))

    def close(self) -> None:
        """For good."""
        self._client.close()

    # What its keeper asks (`planner.service.keeper.LedgerStore`)

    def write(self, ledger: Ledger, entry: LedgerEntry | None) -> None:
        """Keeps both, or neither. Raises Deposed where another service leads, or may have changed the ledger."""
        data = msgspec.json.encode(ledger)
        if len(data) > MAX_LEDGER_BYTES:
            raise OSError(f"the ledger has {len(data)} bytes, and etcd takes {MAX_LEDGER_BYTES}")
        with self._one_write:
            if not self.leads:
                raise Deposed("this service leads no more")
            noted = self._noted(entry) if entry is not None else []
            kept = RequestOp(request_put=PutRequest(key=self._key("state/ledger"), value=data))
            answer = self._transacted(self._fence(), [*noted, kept])
            if not answer:
                self._led_since = 0
                raise Deposed(
                    "another service leads, or an answer of etcd was lost: look what is in force, then ask again"
                )
            self._seen_at = answer
            self._next_entry += entry is not None

    def last_entries(self, limit: int) -> list[LedgerEntry]:
        """The last lines of the log, oldest first."""
        end = self._num_entries()
        entries: list[LedgerEntry] = []
        for start in range(max(0, end - limit), end, PAGE_ENTRIES):
            first, beyond = (self._key(_entry_name(number)) for number in (start, min(start + PAGE_ENTRIES, end)))
            entries += map(_entry, self._range(first, beyond))
        return entries

    def _noted(self, entry: LedgerEntry) -> list[RequestOp]:
        number = self._next_entry
        note = PutRequest(key=self._key(_entry_name(number)), value=msgspec.json.encode(entry))
        count = PutRequest(key=self._key("state/entries"), value=str(number + 1).encode())
        changes = [RequestOp(request_put=note), RequestOp(request_put=count)]
        if number >= MOST_ENTRIES:
            old = DeleteRangeRequest(
                key=self._key(_entry_name(0)), range_end=self._key(_entry_name(number - MOST_ENTRIES + 1))
            )
            changes.append(RequestOp(request_delete_range=old))
        return changes

    def _fence(self) -> list[Compare]:
        leader, ledger = self._key("state/leader"), self._key("state/ledger")
        return [
            Compare(result=Compare.EQUAL, target=Compare.CREATE, key=leader, create_revision=self._led_since),
            Compare(result=Compare.EQUAL, target=Compare.MOD, key=ledger, mod_revision=self._seen_at),
        ]

    def _num_entries(self) -> int:
        found = self._found("state/entries")
        return int(found.value) if found is not None and MAY_BE_A_COUNT(found.value) else 0

    def _decoded(self, kv: EtcdKeyValue | None) -> Ledger | None:
        if kv is None:
            return None
        try:
            return msgspec.json.decode(kv.value, type=Ledger)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            key = f"{self._root}state/ledger"
            raise InputError(
                f"{self._client.where}: {key}: not a ledger ({exc}); delete it to start without one"
            ) from exc

    def _found(self, name: str) -> EtcdKeyValue | None:
        return next(iter(self._range(self._key(name))), None)

    def _range(self, first: bytes, beyond: bytes = b"") -> Sequence[EtcdKeyValue]:
        return self._asked(lambda: self._client.range(first, beyond).kvs)

    def _transacted(self, if_so: Sequence[Compare], changes: Sequence[RequestOp]) -> int:
        """The revision of the changes; 0: they were not to be made."""
        answer = self._asked(lambda: self._client.transact(TxnRequest(compare=if_so, success=changes)))
        return answer.header.revision if answer.succeeded else 0

    def _asked(self, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except EtcdFailed as failure:
            raise OSError(str(failure)) from failure

    def _key(self, name: str) -> bytes:
        return f"{self._root}{name}".encode()


def _entry_name(number: int) -> str:
    return f"audit/{number:016d}"


def _entry(kv: EtcdKeyValue) -> LedgerEntry:
    """Raises OSError for what is no line of ours."""
    try:
        return msgspec.json.decode(kv.value, type=LedgerEntry)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise OSError(f"{kv.key.decode(errors='backslashreplace')}: no line of the log: {exc}") from exc


def _leader(kv: EtcdKeyValue | None) -> PlanLeader | None:
    """One of another version has no address that is known here."""
    if kv is None:
        return None
    try:
        return msgspec.json.decode(kv.value, type=PlanLeader)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return PlanLeader(process="", url="")

"""What the keys of one etcd say of a fleet, as they come and go.

    PREFIX/nodes/registered/NODE   written by the node under a lease; it is empty for a moment where the node ends itself
    PREFIX/nodes/listed/NODE       written by an operator; it stays until it is removed

etcd deletes a key with its lease and does not say why. A node that ends says so first, so a deletion without that is a lease
that ran out. Such a node stays for a while: where all nodes lose etcd at once, their leases end one after the other. It is
dropped only if another node still renews its own. Where none does, it is the registry that nodes do not reach.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from membership.documents import read_entry
from membership.errors import SourceFailed
from membership.member import Member
from membership.sources import MAX_ENTRIES
from membership.view import RegistryReading
from transport.control.settings import SettingsError

REGISTERED: Final = "registered/"
LISTED: Final = "listed/"
FAREWELL: Final = b""
LEASE_S: Final = 30.0  # of a node; it renews it three times as often
GRACE_S: Final = 15.0  # within which the leases of others have ended, too, if all nodes have lost etcd
ANOTHER_S: Final = 2 * LEASE_S  # after which nodes have registered at an etcd that has forgotten them
MAX_VALUE_BYTES: Final = 64 * 1024
MAX_PROBLEMS: Final = 32
MAX_NAME_CHARS: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredKey:
    """A key below the root, and what it holds. `value` is None where it is too long to be kept."""

    name: str
    value: bytes | None
    is_leased: bool

    @property
    def is_farewell(self) -> bool:
        """Whether a node says that it ends."""
        return self.value == FAREWELL and self.name.startswith(REGISTERED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All keys at one revision of one etcd."""

    keys: Sequence[StoredKey]
    revision: int
    cluster: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A key as it was read. `member` is the last one that it named; `problem` is why its value says nothing new."""

    key: StoredKey
    member: Member | None = None
    problem: str = ""

    @property
    def has_left(self) -> bool:
        return self.key.is_farewell

    @property
    def lives(self) -> bool:
        return self.key.is_leased and not self.has_left


class EtcdListing:
    """The members by what has been read and watched. Times are of a clock that only goes forward."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._known: dict[str, _Entry] = {}
        self._gone: dict[str, tuple[_Entry, float]] = {}  # and until when its member stays
        self._revision = 0  # the latest that was seen of any endpoint
        self._cluster: int | None = None
        self._removed_at = 0  # the revision of the last removal
        self._is_empty_meant = False
        self._is_silent = False
        self._another = ""
        self._another_until = 0.0
        self._reading: RegistryReading | None = None  # until something differs

    def __len__(self) -> int:
        """How many keys it holds."""
        return len(self._known)

    def snapshot(self, found: Snapshot, now: float) -> None:
        """Everything was read anew. An etcd that is not the one before, or is back at an earlier time, has forgotten nodes."""
        self._reading = None
        is_another = self._cluster is not None and (found.cluster != self._cluster or found.revision < self._revision)
        missing = self._known.keys() - {key.name for key in found.keys}
        for name in sorted(missing):
            if is_another:
                self._stays(name, now + ANOTHER_S)
            else:
                self.delete(name, found.revision, now)
        for key in found.keys:
            self.put(key, now)
        if is_another:
            same = "restored from a backup" if found.cluster == self._cluster else "another one"
            self._another = (
                f"{self._root}: etcd is {same}; nodes that it does not list have {ANOTHER_S:g} s to register"
            )
            self._another_until = now + ANOTHER_S
        self._cluster, self._revision = found.cluster, found.revision

    def saw(self, revision: int) -> None:
        """Etcd has got that far: only one that was restored lists less."""
        self._revision = max(self._revision, revision)

    def put(self, key: StoredKey, now: float) -> None:
        """A key has another value."""
        if not key.name.startswith((REGISTERED, LISTED)):
            return
        self._reading = None
        before = self._known.get(key.name)
        if key.is_farewell:
            self._gone.pop(key.name, None)
            if before is None or not before.has_left:
                self._known[key.name] = _Entry(key=key)
                self._left(0)
            return
        stayed = self._gone.pop(key.name, None)
        known = before or (stayed[0] if stayed is not None else None)
        self._known[key.name] = self._read(key, known)
        self._is_empty_meant = False
        if self._is_silent and key.is_leased:
            self._begin_anew(now)

    def delete(self, name: str, revision: int, now: float) -> None:
        """A key is gone since `revision`."""
        entry = self._known.get(name)
        if entry is None:
            return
        self._reading = None
        if entry.lives:
            self._stays(name, now + GRACE_S)
            return
        del self._known[name]
        if not entry.has_left:
            self._left(revision)

    def reading(self, now: float) -> RegistryReading:
        """What it comes to. Raises SourceFailed where no node renews its lease any more."""
        if self._reading is not None and not self._gone and now >= self._another_until:
            return self._reading
        is_any_alive = any(entry.lives for entry in self._known.values())
        if not is_any_alive and any(entry.lives for entry, _ in self._gone.values()):
            self._is_silent = True
            raise SourceFailed("silent", f"{self._root}: no node renews its lease any more: do they reach etcd?")
        self._gone = {name: (entry, until) for name, (entry, until) in self._gone.items() if now < until}
        members = self._members()
        self._reading = RegistryReading(
            members=members, problems=self._problems(now), is_empty_meant=self._is_empty_meant and not members
        )
        return self._reading

    def members_by_name(self) -> dict[str, Member]:
        """Members by their key, those that etcd lists now."""
        return {name: entry.member for name, entry in self._known.items() if entry.member is not None}

    def _members(self) -> tuple[Member, ...]:
        """What a node says of itself comes before what an operator has listed."""
        known = self.members_by_name()
        if not known:
            return ()
        known |= {name: entry.member for name, (entry, _) in self._gone.items() if entry.member is not None}
        found: dict[str, Member] = {}
        for name in sorted(known, key=lambda name: (name.startswith(LISTED), name)):
            found.setdefault(known[name].id, known[name])
        return tuple(found.values())

    def _problems(self, now: float) -> tuple[str, ...]:
        problems = [entry.problem for entry in self._known.values() if entry.problem]
        if len(problems) > MAX_PROBLEMS:
            problems[MAX_PROBLEMS:] = [f"{self._root}: {len(problems) - MAX_PROBLEMS} more keys that cannot be used"]
        return ((self._another,) if now < self._another_until else ()) + tuple(problems)

    def _read(self, key: StoredKey, known: _Entry | None) -> _Entry:
        """What cannot be used leaves the member as it was known."""
        if known is not None and known.key.value == key.value and key.value is not None:
            return replace(known, key=key)
        try:
            return _Entry(key=key, member=_member(key))
        except SettingsError as error:
            shown = key.name if len(key.name) <= MAX_NAME_CHARS else f"{key.name[:MAX_NAME_CHARS]}..."
            before = known.member if known is not None else None
            return _Entry(key=key, member=before, problem=f"{self._root}{shown}: {error}")

    def _stays(self, name: str, until: float) -> None:
        entry = self._known.pop(name)
        if entry.member is not None and not entry.has_left and len(self._gone) < MAX_ENTRIES:
            self._gone[name] = entry, until
        self._is_empty_meant = False

    def _left(self, revision: int) -> None:
        """One has left on purpose. Where others go in the same step, the list has been lost rather than emptied."""
        self._is_empty_meant = not self._gone and (revision == 0 or revision != self._removed_at)
        self._removed_at = revision

    def _begin_anew(self, now: float) -> None:
        """A node is back: the others have as long as a lease to be back, too."""
        self._is_silent = False
        self._gone = {name: (entry, now + LEASE_S) for name, (entry, _) in self._gone.items()}


def _member(key: StoredKey) -> Member:
    """Raises SettingsError."""
    if key.value is None:
        raise SettingsError(f"longer than {MAX_VALUE_BYTES} bytes")
    member, _ = read_entry(key.value)
    if member.id != key.name.partition("/")[2]:
        raise SettingsError(f"it is the entry of another node: id = {member.id!r}")
    return member

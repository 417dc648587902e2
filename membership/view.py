"""What one registry says of a fleet, and since when. A registry that fails freezes its view, and never empties it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from membership.member import Member


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryReading:
    """What a registry said when it was asked. `problems` are entries that could not be used, in words; `left_out` counts
    them by reason, where the registry has reasons.

    An empty list is believed only where `is_empty_meant`.
    """

    members: Sequence[Member] = ()
    is_empty_meant: bool = False
    problems: tuple[str, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The members by id. It is synced once the registry has been read as a whole, and fresh unless `frozen_since` is set.

    `reason` says why it is frozen, in words; `problems` are entries that were left as they had been, or out, and
    `left_out` counts them by reason.
    """

    members: Mapping[str, Member] = field(default_factory=dict)
    is_synced: bool = False
    frozen_since: float | None = None
    reason: str = ""
    problems: tuple[str, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def state(self) -> str:
        """In a word: unread, fresh or frozen."""
        if self.frozen_since is not None:
            return "frozen" if self.is_synced else "unread"
        return "fresh" if self.is_synced else "unread"

    def frozen_s(self, now: float) -> float:
        """For how long it has been frozen."""
        return 0.0 if self.frozen_since is None else max(0.0, now - self.frozen_since)

    def read(self, found: RegistryReading, now: float) -> "View":
        """The view after the registry has answered.

        One that lists no member any more is taken for one that has lost its memory: every member stays.
        """
        if self.members and not found.members and not found.is_empty_meant:
            lost = self.failed("it lists no node any more; what it listed before stays", now)
            return replace(lost, problems=found.problems, left_out=found.left_out)
        members = {member.id: member for member in found.members}
        return View(members=members, is_synced=True, problems=found.problems, left_out=found.left_out)

    def failed(self, reason: str, now: float) -> "View":
        """The view after the registry has not answered, or not in a way that can be used."""
        since = now if self.frozen_since is None else self.frozen_since
        return replace(self, frozen_since=since, reason=reason)

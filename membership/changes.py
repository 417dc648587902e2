"""What is different between two views of a fleet."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from membership.member import Member


class ChangeKind(StrEnum):
    """What has happened to a member."""

    LEFT = "left"
    MOVED = "moved"  # its agent answers elsewhere, or under another certificate
    ROLE = "role"
    DETAILS = "details"  # cluster, revision or labels
    JOINED = "joined"


@dataclass(frozen=True, slots=True)
class MemberChange:
    """`before` is None for one that joined, `after` for one that left."""

    kind: ChangeKind
    before: Member | None
    after: Member | None

    def __str__(self) -> str:
        """In words, as a log tells it after the member's id."""
        if self.after is None:
            return "has left"
        if self.before is None:
            return f"has joined at {self.after.agent}"
        was, now = self.before, self.after
        match self.kind:
            case ChangeKind.MOVED:
                return f"moves from {was.agent} to {now.agent}"
            case ChangeKind.ROLE:
                return f"is listed as {now.role or 'without a role'}, was as {was.role or 'without'}"
        return "is listed with other details"

    @property
    def id(self) -> str:
        """Of the member that changed."""
        member = self.after or self.before
        assert member is not None
        return member.id


def changes(old: Mapping[str, Member], new: Mapping[str, Member]) -> Iterator[MemberChange]:
    """Turns `old` into `new`. Those that left come first: another member may have their address now."""
    for id_, before in old.items():
        if id_ not in new:
            yield MemberChange(ChangeKind.LEFT, before, None)
    for id_, after in new.items():
        known = old.get(id_)
        if known is not None and known != after:
            yield from _of_one(known, after)
    for id_, after in new.items():
        if id_ not in old:
            yield MemberChange(ChangeKind.JOINED, None, after)


def _of_one(before: Member, after: Member) -> Iterator[MemberChange]:
    if (before.agent, before.name) != (after.agent, after.name):
        yield MemberChange(ChangeKind.MOVED, before, after)
    if before.role != after.role:
        yield MemberChange(ChangeKind.ROLE, before, after)
    if (before.cluster, before.revision, before.labels) != (after.cluster, after.revision, after.labels):
        yield MemberChange(ChangeKind.DETAILS, before, after)

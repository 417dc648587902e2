"""All registries of a gateway together: one set of members."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from membership.member import Member
from membership.view import View


@dataclass(frozen=True, slots=True)
class MemberFleet:
    """The views by the name of their registry. Where two registries disagree about a member, the first one counts."""

    views: Mapping[str, View] = field(default_factory=dict)

    def seen(self, source: str, view: View) -> "MemberFleet":
        """The fleet after a registry has another view."""
        return replace(self, views={**self.views, source: view})

    @property
    def is_synced(self) -> bool:
        """Whether every registry has been read once."""
        return all(view.is_synced for view in self.views.values())

    def members(self) -> dict[str, Member]:
        """Every member once, by id."""
        return self._merged()[0]

    def sources(self) -> dict[str, str]:
        """The registry that counts for each member, by the member's id."""
        return {id_: source for source, ids in self._merged()[1].items() for id_ in ids}

    def clashes(self) -> list[str]:
        """In words: members that are not taken, as another registry or another member comes first."""
        return self._merged()[2]

    def _merged(self) -> tuple[dict[str, Member], dict[str, list[str]], list[str]]:
        found: dict[str, Member] = {}
        at: dict[str, str] = {}  # ids, by the agent's address
        of: dict[str, list[str]] = {source: [] for source in self.views}
        clashes = []
        for source, view in self.views.items():
            for member in view.members.values():
                if member.id in found:
                    if found[member.id] != member:
                        clashes.append(f"{source}: {member.id} is known from another registry, which counts")
                elif (other := at.get(member.agent)) is not None:
                    clashes.append(f"{source}: {member.id} is left out: {member.agent} is the agent of {other}")
                else:
                    found[member.id] = member
                    at[member.agent] = member.id
                    of[source].append(member.id)
        return found, of, clashes

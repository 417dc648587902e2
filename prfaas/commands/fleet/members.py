"""The nodes of a gateway as it would read them now: those of its file, then those of its registries."""

from dataclasses import dataclass

from gateway.config.gateway import GatewayConfig
from gateway.members.roster import STATIC
from membership.errors import SourceFailed
from membership.fleet import MemberFleet
from membership.kubernetes.settings import KUBERNETES
from membership.member import Member
from membership.sources import listed_by
from membership.view import RegistryReading, View


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedMembers:
    """What is listed, and by which registry. `failures` are registries that cannot be read, `problems` smaller things.

    `refused` may not be spoken to, as the way to them would be in clear.
    """

    members: tuple[Member, ...]
    source_of: dict[str, str]
    refused: tuple[Member, ...]
    failures: tuple[str, ...]
    problems: tuple[str, ...]


def listed_members(config: GatewayConfig) -> ListedMembers:
    """Asks each registry once; that may block."""
    fleet = MemberFleet().seen(STATIC, View(members={node.agent: node.member for node in config.nodes}, is_synced=True))
    failures, problems = [], list[str]()
    for source, answer in listed_by(config.membership.sources()):
        if isinstance(answer, SourceFailed):
            failures.append(f"{source}: {answer}")
        else:
            problems += [
                f"{source}: {problem}" for problem in answer.problems or _nothing_listed(config, source, answer)
            ]
            fleet = fleet.seen(source, View().read(answer, 0.0))
    found = fleet.members().values()
    return ListedMembers(
        members=tuple(member for member in found if config.admits(member)),
        source_of=fleet.sources(),
        refused=tuple(member for member in found if not config.admits(member)),
        failures=tuple(failures),
        problems=(*problems, *fleet.clashes()),
    )


def _nothing_listed(config: GatewayConfig, source: str, answer: RegistryReading) -> list[str]:
    """A selector that chooses nothing is no error of the API server's, and easily one of ours."""
    kubernetes = config.membership.kubernetes
    if kubernetes is None or source != KUBERNETES or answer.members:
        return []
    return [f"no Pod is a node: {kubernetes.choice}"]

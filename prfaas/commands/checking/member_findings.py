"""What `prfaas check` makes of the registries that list a gateway's nodes."""

from collections.abc import Iterator, Sequence

from membership.etcd.settings import EtcdConfig
from prfaas.commands.checking.findings import Described, Finding, Level
from prfaas.commands.fleet.members import ListedMembers


def etcd_findings(etcd: EtcdConfig | None, has_identity: bool) -> Iterator[Finding]:
    """Ways to etcd on which others can change what it says. Certificates of nodes hold even then."""
    for hop in etcd.plain_hops if etcd is not None else ():
        yield Finding(
            Level.WARNING if has_identity else Level.ERROR,
            "members",
            f"etcd at {hop} is another machine, and is asked in clear: others on the way can send prompts elsewhere",
            "use https:// endpoints with authority, certificate and key",
        )


def fleet_findings(etcd: EtcdConfig | None) -> Iterator[Finding]:
    """Ways to the etcd of `[gateway.fleet]` on which others can change limits and drains."""
    for hop in etcd.plain_hops if etcd is not None else ():
        yield Finding(
            Level.WARNING,
            "fleet",
            f"etcd at {hop} is another machine, and is asked in clear: others on the way can change limits and drain links",
            "use https:// endpoints with authority, certificate and key",
        )


def member_findings(listed: ListedMembers, described: Sequence[Described]) -> Iterator[Finding]:
    """Registries that cannot be read, nodes that are left out, and nodes that call themselves otherwise."""
    for failure in listed.failures:
        yield Finding(
            Level.ERROR,
            "members",
            failure,
            "a gateway that runs keeps the nodes that it knows; one that starts finds none",
        )
    for member in listed.refused:
        yield Finding(
            Level.ERROR,
            "members",
            f"{member.id} at {member.agent} is another machine, and traffic to it would be in clear",
            "set certificate, key and authority, or plain = true",
        )
    for problem in listed.problems:
        yield Finding(Level.WARNING, "members", problem)
    by_agent = {member.agent: member for member in listed.members}
    for node in described:
        known = by_agent.get(node.address)
        if known is None or known.id in (known.agent, node.info.node_id):
            continue
        yield Finding(
            Level.WARNING,
            "members",
            f"{known.id} at {known.agent} says that it is {node.info.node_id}",
            "list it by the name that it has: what a gateway learns of a node is kept by that",
        )

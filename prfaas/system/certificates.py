"""Certificates for nodes and gateways, signed by an authority of one's own: for `prfaas certificates` and `prfaas up`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from prfaas.errors import CertificateError
from prfaas.system.site_authorities import AUTHORITIES, AUTHORITY, issue_by_cluster, write_for_all
from transport.control.certificates import Authority
from transport.peers.name import DEFAULT_TRUST, NO_CLUSTER, NamelessPeer, PeerName, PeerRole
from transport.peers.revocation import RevocationList
from transport.wire.identity import Identity

GATEWAY_NAME: Final = "gateway"
OPERATOR_NAME: Final = "operator"
PLANNER_NAME: Final = "planner"
NODE_ROLES: Final = {"prfaas": PeerRole.PREFILL, "pd": PeerRole.NODE}
REVOKED: Final = "revoked"
WHAT_IS_REVOKED: Final = (
    "# Certificates that count no more: one name or serial number a line. Read again when it changes.\n"
)


@dataclass(frozen=True, slots=True)
class CertificateHolder:
    """Who gets a certificate: who it is to others, and the hosts that it is good for, too."""

    peer: PeerName
    hosts: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Of the files, too."""
        return self.peer.name

    def of_trust(self, trust: str) -> "CertificateHolder":
        """The same holder in another trust domain. Raises CertificateError."""
        try:
            return replace(self, peer=replace(self.peer, trust=trust))
        except NamelessPeer as exc:
            raise CertificateError(str(exc)) from exc


def node_holder(cluster: str, kind: str, node_id: str, hosts: tuple[str, ...] = ()) -> CertificateHolder:
    """A node of a cluster of that kind. Raises CertificateError."""
    try:
        return CertificateHolder(PeerName(DEFAULT_TRUST, cluster, NODE_ROLES[kind], node_id), hosts)
    except NamelessPeer as exc:
        raise CertificateError(f"node {node_id} of {cluster}: {exc}") from exc


def clusterless(role: PeerRole, hosts: tuple[str, ...] = ()) -> CertificateHolder:
    """The gateway, the planner or the operator of a site that has one."""
    return CertificateHolder(PeerName(DEFAULT_TRUST, NO_CLUSTER, role, role.value), hosts)


def holder(text: str) -> CertificateHolder:
    """CLUSTER/ROLE/NAME or ROLE/NAME or ROLE, and =HOST,HOST. Raises ValueError."""
    who, equals, hosts = text.partition("=")
    parts = who.split("/")
    role = parts[0] if len(parts) < 3 else parts[1]
    if len(parts) > 3 or role not in {*PeerRole} or not parts[-1] or parts[-1] == "authority":
        raise ValueError(
            f"{text!r}: must be CLUSTER/ROLE/NAME, as east/prefill/east-p0, or gateway, planner or operator; "
            f"roles are {', '.join(PeerRole)}"
        )
    if len(parts) < 3 and role in NODE_ROLES.values():
        raise ValueError(f"{text!r}: a {role} belongs to a cluster: CLUSTER/{role}/NAME")
    if equals and not all(hosts.split(",")):
        raise ValueError(f"{text!r}: hosts are separated by commas, and must not be empty")
    cluster = parts[0] if len(parts) == 3 else NO_CLUSTER
    peer = PeerName(DEFAULT_TRUST, cluster, PeerRole(role), parts[-1])
    return CertificateHolder(peer, tuple(hosts.split(",")) if equals else ())


def paths(folder: Path, name: str) -> dict[str, str]:
    """The keys of a configuration for `name`, whose files lie or will lie in `folder`."""
    folder = folder.absolute()
    return {
        "certificate": str(folder / f"{name}.pem"),
        "key": str(folder / f"{name}.key"),
        "authority": str(folder / (AUTHORITIES if (folder / AUTHORITIES).exists() else AUTHORITY)),
        "revoked": str(folder / REVOKED),
    }


def issue(folder: Path, holders: Sequence[CertificateHolder], days: int, *, by_cluster: bool = False) -> list[Identity]:
    """Makes the authority of `folder` unless it is there, and a new certificate for each. Raises CertificateError.

    Where there is a list of authorities, or `by_cluster` asks for one, each cluster has its own.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / REVOKED).exists():
            write_for_all(folder / REVOKED, WHAT_IS_REVOKED)
        if by_cluster or (folder / AUTHORITIES).exists():
            return issue_by_cluster(folder, holders, days)
        authority = Authority(folder)
        return [authority.issue(each.name, each.hosts, days=days, peer=each.peer) for each in holders]
    except OSError as exc:
        raise CertificateError(f"{exc.filename or folder}: {exc.strerror or exc}") from exc
    except ValueError as exc:
        raise CertificateError(f"{folder}: {exc}") from exc


def issue_and_tell(
    folder: Path,
    holders: Sequence[CertificateHolder],
    days: int,
    report: Callable[[str], None],
    *,
    by_cluster: bool = False,
) -> None:
    """As `prfaas certificates` does it: what to write into which configuration is said. Raises CertificateError."""
    path = folder / AUTHORITIES
    before = path.read_bytes() if path.exists() else b""
    issue(folder, holders, days, by_cluster=by_cluster)
    if not path.exists():
        report(f"{folder}/authority.key signs certificates: keep it, and keep it secret")
    else:
        report(f"each {folder}/CLUSTER/authority.key signs for its cluster: keep it with who runs that, and secret")
        if path.read_bytes() != before:
            report(f"{path} is new or has a new line: every machine needs it, and the authority.pem of each line")
    revoked = RevocationList(folder / REVOKED).load()
    for each in holders:
        if revoked.names & {each.name, str(each.peer)}:
            report(
                f"{each.name} is revoked by name in {folder / REVOKED}: so is this new certificate, until you remove it"
            )
        lines = [f"{key} = {path!r}" for key, path in paths(folder, each.name).items()]
        report("\n".join(["", f"# {each.name}, good for {days} days: {each.peer}", *lines]).replace("'", '"'))

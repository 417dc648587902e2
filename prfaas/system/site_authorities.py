"""An authority for each cluster, and the list that bounds it to names of that cluster (`transport.peers.authorities`).

DIR/authorities                the list
DIR/CLUSTER/authority.pem      and authority.key, which belongs to who runs that cluster; `any` is for gateways and operators
DIR/authority.pem              all of them, for clients that only compare hosts: curl, Prometheus
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from prfaas.errors import CertificateError
from transport.control.certificates import Authority
from transport.peers.authorities import SiteAuthority, read_list
from transport.peers.name import PeerName
from transport.wire.identity import Identity

AUTHORITIES: Final = "authorities"
AUTHORITY: Final = "authority.pem"
WHAT_IS_LISTED: Final = "# Authorities, and the names that each may sign: CLUSTER/ROLE. Read again when it changes.\n"


class Holder(Protocol):
    """Who gets a certificate."""

    @property
    def peer(self) -> PeerName: ...
    @property
    def hosts(self) -> tuple[str, ...]: ...


def issue_by_cluster(folder: Path, holders: Sequence[Holder], days: int) -> list[Identity]:
    """A new certificate for each, in `folder`, by its cluster's authority. A cluster that is new gets one, and a line in the
    list.

    Raises CertificateError, OSError, ValueError.
    """
    path = folder / AUTHORITIES
    text = path.read_text() if path.exists() else WHAT_IS_LISTED
    listed = read_list(folder, text) if path.exists() else ()
    known = {site.file for site in listed}
    new: dict[str, set[str]] = {}
    for each in holders:
        name = each.peer
        if _file(name) not in known and not _signers(listed, name):
            new.setdefault(_file(name), set()).add(f"{name.cluster}/{name.role}")
    for file in new:
        Authority((folder / file).parent, Path(file).parent.name)
    text += "".join(f"{file} {' '.join(sorted(scopes))}\n" for file, scopes in new.items())
    listed = read_list(folder, text)
    made = [_issue(folder, listed, each, days) for each in holders]
    if new:
        write_for_all(folder / AUTHORITY, "".join((folder / site.file).read_text() for site in listed))
        write_for_all(path, text)
    return made


def write_for_all(path: Path, text: str) -> None:
    """To be read by all, and written by its owner, whatever the umask. A reader meanwhile sees all of it, or the old."""
    beside = path.with_name(f".{path.name}.new")
    beside.unlink(missing_ok=True)
    beside.touch(mode=0o644)
    beside.write_text(text)
    beside.replace(path)


def _issue(folder: Path, listed: Sequence[SiteAuthority], each: Holder, days: int) -> Identity:
    signers = _signers(listed, each.peer)
    if not signers:
        scope = f"{each.peer.cluster}/{each.peer.role}"
        raise CertificateError(
            f"{folder / AUTHORITIES}: no authority signs for {scope}: write that into its line first"
        )
    keys = [(folder / site.file).with_suffix(".key") for site in signers]
    if not any(key.exists() for key in keys):
        raise CertificateError(f"{keys[0]} is not here: {each.peer} is signed where it is")
    home = next(key for key in keys if key.exists()).parent
    return Authority(home).issue(each.peer.name, each.hosts, days=days, peer=each.peer, folder=folder)


def _signers(listed: Sequence[SiteAuthority], name: PeerName) -> list[SiteAuthority]:
    return [site for site in listed if site.signs_for(name)]


def _file(name: PeerName) -> str:
    return f"{name.cluster}/{AUTHORITY}"

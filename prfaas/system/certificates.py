"""Certificates for nodes and gateways, signed by an authority of one's own: for `prfaas certificates` and `prfaas up`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from prfaas.errors import CertificateError
from transport.control.certificates import Authority
from transport.wire.identity import Identity

GATEWAY_NAME = "gateway"


@dataclass(frozen=True, slots=True)
class CertificateHolder:
    """Who gets a certificate: a name, and the hosts that it is good for, too."""

    name: str
    hosts: tuple[str, ...] = ()


def holder(text: str) -> CertificateHolder:
    """NAME or NAME=HOST,HOST. Raises ValueError."""
    name, equals, hosts = text.partition("=")
    if not name or not all(c.isalnum() or c in "-_." for c in name) or name == "authority":
        raise ValueError(f"{text!r}: a name has only letters, digits, '-', '_' and '.', and is not 'authority'")
    if equals and not all(hosts.split(",")):
        raise ValueError(f"{text!r}: hosts are separated by commas, and none is empty")
    return CertificateHolder(name, tuple(hosts.split(",")) if equals else ())


def paths(folder: Path, name: str) -> dict[str, str]:
    """The three keys of a configuration for `name`, whose files lie or will lie in `folder`."""
    folder = folder.absolute()
    return {
        "certificate": str(folder / f"{name}.pem"),
        "key": str(folder / f"{name}.key"),
        "authority": str(folder / "authority.pem"),
    }


def issue(folder: Path, holders: Sequence[CertificateHolder], days: int) -> list[Identity]:
    """Makes the authority of `folder` unless it is there, and a new certificate for each. Raises CertificateError."""
    try:
        authority = Authority(folder)
        return [authority.issue(each.name, each.hosts, days=days) for each in holders]
    except (OSError, ValueError) as exc:
        raise CertificateError(f"{folder}: {exc}") from exc


def issue_and_tell(
    folder: Path, holders: Sequence[CertificateHolder], days: int, report: Callable[[str], None]
) -> None:
    """As `prfaas certificates` does it: what to write into which configuration is said."""
    issue(folder, holders, days)
    report(f"{folder}/authority.key signs certificates: keep it, and keep it secret")
    for each in holders:
        lines = [f"{key} = {path!r}" for key, path in paths(folder, each.name).items()]
        report("\n".join(["", f"# {each.name}, good for {days} days", *lines]).replace("'", '"'))

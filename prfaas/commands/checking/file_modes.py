"""What `prfaas check` looks at in modes of files: who else on this machine reads secrets, or says whom to trust."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from gateway.config.gateway import GatewayConfig
from membership.etcd.settings import EtcdConfig
from membership.sources import ENTRY_SUFFIX
from prfaas.commands.checking.findings import OpenFile
from transport.peers.authorities import Authorities

TO_READ: Final = 0o077  # by anybody but the owner
TO_WRITE: Final = 0o022
STICKY: Final = 0o1000  # files of the folder are their owners' alone, as in /tmp


def open_files(config: GatewayConfig) -> list[OpenFile]:
    """Files that others on this machine can read, or write, and should not."""
    return [
        *(OpenFile(str(path), mode) for path, mode in _modes(_secrets(config)) if mode & TO_READ),
        *_written_by_others(config),
    ]


def etcds_of(config: GatewayConfig) -> list[EtcdConfig]:
    """Those that list nodes, and that other gateways are agreed with over."""
    return [etcd for etcd in (config.membership.etcd, config.fleet.etcd) if etcd is not None]


def _secrets(config: GatewayConfig) -> set[Path]:
    found = {path for path in (config.key, config.tls_key, config.names_secret) if path is not None}
    found |= {path for etcd in etcds_of(config) for path in etcd.secrets}
    kubernetes = config.membership.kubernetes
    if kubernetes is not None and not kubernetes.is_kubelets:
        found.add(kubernetes.token_file)
    if config.identity is not None:
        listed = _authorities(config)
        found |= {*config.identity.key.parent.glob("*.key"), *(path.with_suffix(".key") for path in listed)}
    return found


def _authorities(config: GatewayConfig) -> list[Path]:
    """The PEM files of those who sign for peers."""
    try:
        said = config.identity.authorities() if config.identity is not None else None
    except OSError:  # others tell of it
        said = None
    return authority_files(config.authority, said)


def authority_files(path: Path | None, authorities: Authorities | None) -> list[Path]:
    """The PEM files that a list of authorities names; without a list, the file itself."""
    if path is None or authorities is None or authorities.sites is None:
        return [path] if path is not None else []
    return [path.parent / site.file for site in authorities.sites]


def _written_by_others(config: GatewayConfig) -> Iterator[OpenFile]:
    """Registries: who writes one says where prompts go. A file can also be replaced by who writes in its folder.

    Authorities, lists of them and of revoked certificates are no better than who writes them.
    """
    file, folder = config.membership.file, config.membership.folder
    of_registries = [each.authority for each in etcds_of(config)]
    if config.membership.kubernetes is not None:
        of_registries.append(config.membership.kubernetes.authority)
    trusted = (config.authority, config.revoked, *_authorities(config), *of_registries)
    single = {each for each in (file, *trusted) if each is not None}
    registries = single | {folder} if folder is not None else single
    parents = {each.parent for each in single} - registries
    for path, mode in _modes(registries | parents):
        if mode & TO_WRITE and not (path in parents and mode & STICKY):
            yield OpenFile(str(path), mode & 0o777, is_written=True)
    entries = folder.glob(f"*{ENTRY_SUFFIX}") if folder is not None else ()
    open_entries = [(path, mode) for path, mode in _modes(entries) if mode & TO_WRITE]
    if open_entries:  # one line for all: there may be thousands
        path, mode = open_entries[0]
        yield OpenFile(str(path), mode, is_written=True, more=len(open_entries) - 1)


def _modes(paths: Iterable[Path]) -> Iterator[tuple[Path, int]]:
    """Of those that are there."""
    for path in sorted(set(paths)):
        try:
            yield path, path.stat().st_mode & 0o1777
        except OSError:
            continue  # others tell of files that cannot be read

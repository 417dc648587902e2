"""Where a gateway reads which nodes there are, beside [[gateway.nodes]]."""

from dataclasses import dataclass
from pathlib import Path

from membership.etcd.settings import EtcdConfig
from membership.sources import Source, sources_of


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipConfig:
    """`[gateway.membership]`. `file` lists nodes, and is watched; in `folder` and in `etcd` nodes list themselves."""

    file: Path | None = None
    folder: Path | None = None
    etcd: EtcdConfig | None = None

    @property
    def is_set(self) -> bool:
        """Whether nodes may come that the gateway's own file does not list."""
        return self.file is not None or self.folder is not None or self.etcd is not None

    def sources(self) -> list[Source]:
        """The registries, the one that counts first."""
        found = sources_of(self.file, self.folder)
        if self.etcd is not None:
            from membership.etcd.source import EtcdSource  # its messages are loaded where there is an etcd

            found.append(EtcdSource(self.etcd))
        return found

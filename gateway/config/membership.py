"""Where a gateway reads which nodes there are, beside [[gateway.nodes]]."""

from dataclasses import dataclass
from pathlib import Path

from membership.etcd.settings import EtcdConfig
from membership.kubernetes.settings import KubernetesConfig
from membership.sources import Source, sources_of


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipConfig:
    """`[gateway.membership]`. `file` lists nodes, and is watched; in `folder` and in `etcd` nodes list themselves.

    With `kubernetes`, Pods are nodes.
    """

    file: Path | None = None
    folder: Path | None = None
    etcd: EtcdConfig | None = None
    kubernetes: KubernetesConfig | None = None

    @property
    def is_set(self) -> bool:
        """Whether nodes may come that the gateway's own file does not list."""
        return any(each is not None for each in (self.file, self.folder, self.etcd, self.kubernetes))

    def sources(self) -> list[Source]:
        """The registries, the one that counts first."""
        found = sources_of(self.file, self.folder)
        if self.etcd is not None:
            from membership.etcd.source import EtcdSource  # its messages are loaded where there is an etcd

            found.append(EtcdSource(self.etcd))
        if self.kubernetes is not None:
            from membership.kubernetes.source import (
                KubernetesSource,  # its client is loaded where there is an API server
            )

            found.append(KubernetesSource(self.kubernetes))
        return found

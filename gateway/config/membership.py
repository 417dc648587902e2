"""Where a gateway reads which nodes there are, beside [[gateway.nodes]]."""

from dataclasses import dataclass
from pathlib import Path

from membership.sources import Source, sources_of


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipConfig:
    """`[gateway.membership]`. `file` lists nodes, and is watched; in `folder` each node has a file of its own."""

    file: Path | None = None
    folder: Path | None = None

    @property
    def is_set(self) -> bool:
        """Whether nodes may come that the gateway's own file does not list."""
        return self.file is not None or self.folder is not None

    def sources(self) -> list[Source]:
        """The registries, the one that counts first."""
        return sources_of(self.file, self.folder)

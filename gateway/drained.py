"""Links that operators have drained: of one process, of all workers of a gateway, or of whoever is given the same folder."""

import os
from pathlib import Path
from typing import Protocol
from urllib.parse import quote, unquote

Link = tuple[str, str]  # clusters: source, destination


class Drained(Protocol):
    """Who drains a link, or has it used again, does so for all who have this."""

    def set(self, link: Link, is_drained: bool) -> None:
        """Raises OSError."""
        ...

    def links(self) -> frozenset[Link]: ...


class OwnDrained:
    """Of this process alone."""

    def __init__(self) -> None:
        self._links: frozenset[Link] = frozenset()

    def set(self, link: Link, is_drained: bool) -> None:
        self._links = self._links | {link} if is_drained else self._links - {link}

    def links(self) -> frozenset[Link]:
        return self._links


class SharedDrained:
    """Of all who have this folder: an empty file for each link, so that nobody undoes what another is told."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def set(self, link: Link, is_drained: bool) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / " ".join(quote(name, safe="") for name in link)
        if is_drained:
            file.touch()
        else:
            file.unlink(missing_ok=True)

    def links(self) -> frozenset[Link]:
        names = os.listdir(self._folder) if self._folder.is_dir() else ()
        pairs = (name.partition(" ") for name in names)
        return frozenset((unquote(source), unquote(destination)) for source, _, destination in pairs)

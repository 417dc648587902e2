"""Links that operators have drained: of one process, of all workers of a gateway, or of all gateways with the same folder."""

import logging
import os
from pathlib import Path
from typing import Protocol
from urllib.parse import quote, unquote

log = logging.getLogger("prfaas.gateway.links")

Link = tuple[str, str]  # clusters: source, destination


class DrainedLinks(Protocol):
    """Who drains a link, or has it used again, does so for all who have this."""

    def set(self, link: Link, is_drained: bool) -> None:
        """Raises OSError."""
        ...

    def links(self) -> frozenset[Link]: ...


class LocalDrainedLinks:
    """Of this process alone."""

    def __init__(self) -> None:
        self._links: frozenset[Link] = frozenset()

    def set(self, link: Link, is_drained: bool) -> None:
        self._links = self._links | {link} if is_drained else self._links - {link}

    def links(self) -> frozenset[Link]:
        return self._links


class SharedDrainedLinks:
    """Of all gateways with this folder: an empty file for each link, so that none undoes what another was told.

    A folder that is gone or cannot be read says nothing: what was known of it stays, and comes back with the next change.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: frozenset[Link] = frozenset()
        self._is_failing = False

    def set(self, link: Link, is_drained: bool) -> None:
        if not self._folder.is_dir():
            self._folder.mkdir(parents=True, exist_ok=True)
            for each in self._known:
                self._file(each).touch()
        file = self._file(link)
        if is_drained:
            file.touch()
        else:
            file.unlink(missing_ok=True)

    def links(self) -> frozenset[Link]:
        try:
            names = os.listdir(self._folder)
        except OSError as error:
            # It does not exist yet, where nothing is drained.
            if not self._is_failing and (self._known or not isinstance(error, FileNotFoundError)):
                self._is_failing = True
                log.error("which links are drained cannot be read, it stays as it was: %s", error)
            return self._known
        self._is_failing = False
        pairs = (name.partition(" ") for name in names)
        self._known = frozenset(
            (unquote(source), unquote(destination)) for source, _, destination in pairs if source and destination
        )
        return self._known

    def _file(self, link: Link) -> Path:
        return self._folder / " ".join(quote(name, safe="") for name in link)

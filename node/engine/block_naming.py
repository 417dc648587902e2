"""What names of a node's blocks start from, by a file of secrets (`hybrid_cache.hashing.name_secrets`).

Gateways tell engines with each request how its blocks are named. What an engine's own cache holds is named here, and
vLLM compares: it shares no block between requests that a gateway has not put into one namespace.
"""

import logging
from collections.abc import Callable
from pathlib import Path

from hybrid_cache.hashing.name_secrets import UNKEYED, NameSecrets
from node.engine.prefix_cache import EngineCache
from node.errors import NodeConfigError
from transport.control.messages import BlockSalts
from transport.control.secret_files import read_secret

log = logging.getLogger(__name__)


class BlockNaming:
    """The secrets as they were when the file was last read."""

    def __init__(self, path: str) -> None:
        """Raises NodeConfigError."""
        self._path = Path(path) if path else None
        self.secrets = self._read()

    def model_salts(self, layout_fingerprint: str) -> tuple[bytes, ...]:
        """What chains of a model's blocks start from; the first names what is new."""
        return self.secrets.model_salts(layout_fingerprint)

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """Of the secrets; none without a file."""
        return () if self._path is None else self.secrets.fingerprints

    def read_again(
        self, layout_fingerprint: str, cache: EngineCache | None, tell: Callable[[BlockSalts], object] | None
    ) -> str:
        """Reads the file again, and tells the engine of new secrets. A file that cannot be read changes nothing.

        Returns what came of it, as reloads are counted: "applied", "unchanged" or "refused".
        """
        try:
            secrets = self._read()
        except NodeConfigError as error:
            log.error("blocks are named as before: %s", error)
            return "refused"
        if secrets == self.secrets:
            return "unchanged"
        self.secrets = secrets
        log.info("blocks are named by %s", " and before it ".join(secrets.fingerprints))
        salts = self.model_salts(layout_fingerprint)
        if cache is not None:
            cache.rename(salts[0])
        if tell is not None:
            tell(BlockSalts(salts=salts))
        return "applied"

    def _read(self) -> NameSecrets:
        if self._path is None:
            return UNKEYED
        try:
            return NameSecrets.of(read_secret(self._path))
        except (OSError, ValueError) as exc:
            raise NodeConfigError(f"names_secret: {self._path.name}: {exc}") from exc

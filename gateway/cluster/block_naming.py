"""The secrets by which this gateway names blocks, read from their file: at the start, and each time that it reloads."""

import logging
from pathlib import Path

from gateway.cluster.registry import Clusters
from gateway.config.gateway import GatewayConfig
from gateway.errors import GatewayConfigError
from hybrid_cache.hashing.name_secrets import UNKEYED, NameSecrets
from transport.control.secret_files import read_secret

log = logging.getLogger("prfaas.gateway.clusters")


def name_secrets(path: Path | None) -> NameSecrets:
    """Those of `names_secret`. Raises GatewayConfigError."""
    if path is None:
        return UNKEYED
    try:
        return NameSecrets.of(read_secret(path))
    except (OSError, ValueError) as error:
        raise GatewayConfigError(f"names_secret: {path.name}: {error}") from error


class BlockNaming:
    """Has blocks named by what the file says by now. One that cannot be read changes nothing."""

    def __init__(self, clusters: Clusters) -> None:
        self._clusters = clusters

    def configure(self, config: GatewayConfig) -> None:
        try:
            secrets = name_secrets(config.names_secret)
        except GatewayConfigError as error:
            log.error("blocks are named as before: %s", error)
            return
        was = self._clusters.secrets
        if secrets == was:
            return
        self._clusters.rename(secrets)
        log.info("blocks are named by %s, not by %s", _told(secrets), _told(was))


def _told(secrets: NameSecrets) -> str:
    return " and before it ".join(secrets.fingerprints)

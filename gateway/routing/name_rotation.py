"""The way from one secret of names to the next. It ends by itself: no operator has to judge when the earlier one can go.

    the newest is first in the file, and nodes have it      the middle                            the end
    ───┼─── what is cached by earlier names goes on by them ───┼─── ever more of it moves over ───┼─── no earlier names

What has moved is computed once more. From then on it is cached by its newest names, so it stays with those. Prompts move one
by one, each at a point of the second half that its last block decides: alike in all workers and gateways, and not all at once.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from gateway.cluster.registry import Clusters
from gateway.config.gateway import GatewayConfig
from gateway.errors import GatewayConfigError
from gateway.prompt.prompt import Prompt
from gateway.routing.block_naming import by_known_names, name_secrets
from hybrid_cache.hashing.name_secrets import NameSecrets

log = logging.getLogger("prfaas.gateway.clusters")

POINT_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class NameOverlap:
    """While two secrets are in use: from `began_at`, in seconds since the epoch, for `lasts_s`."""

    began_at: float
    lasts_s: float

    def left_s(self, now: float) -> float:
        """Until the earlier names are not looked for any more."""
        return max(0.0, self.began_at + self.lasts_s - now)

    def moved(self, now: float) -> float:
        """The share of prompts that have their newest names whatever is cached: none in the first half, all at the end."""
        left_s = self.left_s(now)
        return 1.0 if not left_s else max(0.0, 1.0 - left_s / (self.lasts_s / 2))


class NameRotationStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How far a rotation is. `waits_for` are nodes that do not have the newest secret: the overlap begins after the last."""

    newest: str
    earlier: str  # "": the file has one secret only
    moved: float = 1.0  # at 1 the earlier secret can be removed
    left_s: float = 0.0
    waits_for: tuple[str, ...] = ()


class NameRotation:
    """The secrets of the file as it was last read, and how far prompts have moved to the first of them."""

    def __init__(self, clusters: Clusters, config: GatewayConfig, unix_s: Callable[[], float]) -> None:
        """`unix_s` is the clock of files' times, so a gateway that starts anew goes on where it was."""
        self._clusters = clusters
        self._unix_s = unix_s
        self._secrets = clusters.secrets
        self._lasts_s = config.names_overlap_s
        self._began_at = put_at(config.names_secret, self._unix_s())

    def configure(self, config: GatewayConfig) -> None:
        """Reads the file again. A file that cannot be read changes nothing."""
        self._lasts_s = config.names_overlap_s
        try:
            secrets = name_secrets(config.names_secret)
        except GatewayConfigError as error:
            log.error("blocks are named as before: %s", error)
            return
        if secrets == self._secrets:
            return
        log.info("blocks are named by %s, not by %s", _told(secrets), _told(self._secrets))
        self._secrets = secrets
        self._began_at = put_at(config.names_secret, self._unix_s())
        self._clusters.rename(secrets)

    def known(self, prompt: Prompt) -> Prompt:
        """`prompt` by the names under which it is cached for the most part, or by its newest, once it has moved."""
        if prompt.earlier is None:
            return prompt
        moved = self.status().moved
        if moved >= 1.0:
            self._end()
        if _point(prompt) < moved:
            return msgspec.structs.replace(prompt, earlier=None)
        return by_known_names(prompt, self._clusters.index_of(prompt.revision))

    def status(self) -> NameRotationStatus:
        """How things stand now."""
        newest, *earlier = self._secrets.fingerprints
        if not self._is_looked_for:
            return NameRotationStatus(newest=newest, earlier="".join(earlier))
        now = self._unix_s()
        waits_for = self._behind(newest)
        if waits_for:
            self._began_at = now
        overlap = NameOverlap(self._began_at, self._lasts_s)
        return NameRotationStatus(
            newest=newest,
            earlier="".join(earlier),
            moved=0.0 if waits_for else overlap.moved(now),
            left_s=overlap.left_s(now),
            waits_for=waits_for,
        )

    @property
    def _is_looked_for(self) -> bool:
        """Whether prompts still have their earlier names."""
        return len(self._clusters.secrets.secrets) > 1

    def _behind(self, newest: str) -> tuple[str, ...]:
        """Nodes that name what their engines cache by something else."""
        known = (node.info for node in self._clusters.nodes if node.connected)
        return tuple(
            info.node_id for info in known
            if info is not None and info.has_own_cache and info.name_secrets[:1] != (newest,)
        )  # fmt: skip

    def _end(self) -> None:
        """No prompt is hashed and looked up twice any more."""
        if self._is_looked_for:
            self._clusters.rename(NameSecrets(self._secrets.secrets[:1]))
            log.info("blocks are named by %s only: what is below it in its file can go", self._secrets.fingerprints[0])


def put_at(path: Path | None, now: float) -> float:
    """When the secrets were written; now, if that is in the future, or of a variable of the environment."""
    try:
        return now if path is None else min(now, path.stat().st_mtime)
    except OSError:
        return now


def _point(prompt: Prompt) -> float:
    """Where in the second half a prompt moves, from 0 to 1."""
    last = prompt.hashes[-1] if prompt.hashes else bytes(POINT_BYTES)
    return int.from_bytes(last[:POINT_BYTES]) / 2.0 ** (8 * POINT_BYTES)


def _told(secrets: NameSecrets) -> str:
    return " and before it ".join(secrets.fingerprints)

"""Has the models of a gateway be those of its file, and of its nodes: builds what is new, and closes what is not served any more.

A model of the file stays while it has no node. One that its nodes alone have brought (`models_dir`) is forgotten when the last of
them has been gone for `model_grace_s`.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from typing import Final, Protocol

from gateway.cluster.registry import Clusters
from gateway.config.gateway import GatewayConfig
from gateway.config.models import FOLDER, MOST_MODELS, REST, ModelCatalog
from gateway.models.served import ModelParts, Models, config_of
from gateway.tasks import TaskSet
from prompts.errors import TokenizerUnreadable
from prompts.fair_cache import FairCache
from prompts.tokens.tokenizer import TextTokenizer

log = logging.getLogger("prfaas.gateway.models")

LOOK_S: Final = 0.5
AGAIN_S: Final = 10.0  # after a tokenizer that could not be read
IDLE_S: Final = 0.1


def brought(config: GatewayConfig, names: Collection[str]) -> set[str]:
    """Of names that nodes announce, those of no table that have a folder with another tokenizer than the gateway's."""
    folder, own = config.models_dir, config.tokenizer_dir
    if folder is None:
        return set()
    known = {name for name in names if config.catalog.of_node(name) not in (None, REST)}
    found = {name: folder / name for name in names if name not in known and FOLDER.fullmatch(name)}
    return {name for name, each in found.items() if each.is_dir() and (own is None or each.resolve() != own.resolve())}


class BuildsModels(Protocol):
    """Builds what serves a model, which lasts as long as the block."""

    def __call__(
        self, config: GatewayConfig, key: str, tokenizer: TextTokenizer
    ) -> AbstractAsyncContextManager[ModelParts]: ...


def loaded(config: GatewayConfig) -> TextTokenizer:
    """The tokenizer of a model. Takes seconds. Raises TokenizerUnreadable."""
    assert config.tokenizer_dir is not None
    tokenizer = TextTokenizer.load(config.tokenizer_dir, FairCache(config.prompt_memory_bytes))
    tokenizer.encoder.hasten()
    return tokenizer


@dataclass(frozen=True, slots=True)
class SeenModels:
    """What nodes call the models that they bring, and when the last node of each was there."""

    last_seen_s: Mapping[str, float] = field(default_factory=dict)

    def at(self, now: float, here: Collection[str], grace_s: float) -> "SeenModels":
        """With those that are here now, without those that have been gone for `grace_s`."""
        kept = {name: at for name, at in self.last_seen_s.items() if now - at < grace_s}
        new = sorted(set(here) - kept.keys())[: max(0, MOST_MODELS - len(kept))]
        return SeenModels(kept | dict.fromkeys([*(name for name in kept if name in here), *new], now))


class ModelUpkeep:
    """Owns the parts of all models but the default one, which its gateway builds first."""

    def __init__(
        self,
        config: GatewayConfig,
        models: Models,
        *,
        clusters: Clusters,
        build: BuildsModels,
        tasks: TaskSet,
        clock: Callable[[], float],
        workers: int = 1,
        load: Callable[[GatewayConfig], TextTokenizer] = loaded,
        on_failed: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """`tasks` are waited for when the gateway ends; `on_failed` is told why a model cannot be served."""
        self._config = config
        self._models = models
        self._clusters = clusters
        self._build = build
        self._tasks = tasks
        self._clock = clock
        self._workers = workers
        self._load = load
        self._on_failed = on_failed
        self._seen = SeenModels()
        self._held: dict[str, AsyncExitStack] = {}
        self._again_at: dict[str, float] = {}

    def configure(self, config: GatewayConfig) -> None:
        """Other models from now on; what is new is there a moment later."""
        self._config = config
        self._again_at.clear()
        catalog = self._catalog()
        self._models.catalog = catalog
        self._clusters.follow(catalog)
        for parts in self._models:
            if catalog.by_name(parts.key) is not None:
                parts.configure(self._of(parts.key))

    async def run(self) -> None:
        """Looks again and again, for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.settle()

    async def settle(self) -> None:
        """Has all models be there that can be now, and no others."""
        here = await asyncio.to_thread(brought, self._config, self._announced()) if self._config.models_dir else set()
        self._seen = self._seen.at(self._clock(), here, self._config.model_grace_s)
        catalog = self._catalog()
        self._models.catalog = catalog
        self._clusters.follow(catalog)
        wanted = [each.name for each in catalog.models]
        for parts in list(self._models):
            if parts.key not in wanted:
                self._retire(self._models.remove(parts.key))
        for key in wanted:
            if key not in self._models and self._again_at.get(key, 0.0) <= self._clock():
                await self._add(key)

    async def close(self) -> None:
        """Closes all that it has built."""
        held, self._held = self._held, {}
        for stack in held.values():
            await stack.aclose()

    def _catalog(self) -> ModelCatalog:
        return self._config.catalog.with_found(self._seen.last_seen_s)

    def _of(self, key: str) -> GatewayConfig:
        return config_of(self._config, self._catalog(), key, self._workers)

    def _announced(self) -> set[str]:
        """What connected nodes call their models."""
        infos = [node.info for node in self._clusters.nodes if node.connected and node.info is not None]
        return {info.model_id for info in infos}

    async def _add(self, key: str) -> None:
        config = self._of(key)
        try:
            tokenizer = await asyncio.to_thread(self._load, config)
        except TokenizerUnreadable as error:
            log.error("model %s is not served: %s", key, error)
            self._on_failed("model_unreadable")
            self._again_at[key] = self._clock() + AGAIN_S
            return
        async with AsyncExitStack() as stack:
            parts = await stack.enter_async_context(self._build(config, key, tokenizer))
            self._held[key] = stack.pop_all()
        self._models.add(parts)
        log.info("model %s is served from now on", key)

    def _retire(self, parts: ModelParts) -> None:
        log.info("model %s is not served any more", parts.key)
        self._tasks.start(self._closed(parts, self._held.pop(parts.key)), "model")

    async def _closed(self, parts: ModelParts, held: AsyncExitStack) -> None:
        """Closes what serves it once nothing is under way there, and at the latest when the gateway ends."""
        try:
            async with asyncio.timeout(self._config.timeouts.drain_s):
                while parts.uses:  # noqa: ASYNC110 nothing tells
                    await asyncio.sleep(IDLE_S)
        except TimeoutError:
            log.warning("model %s is closed with %d requests under way", parts.key, parts.uses)
        finally:
            await held.aclose()

"""Has the models of a gateway be those of its file, and of its nodes: builds what is new, and closes what is not served any more.

A model of the file stays while it has no node. One that its nodes alone have brought (`models_dir`) is forgotten when the last of
them has been gone for `model_grace_s`.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from gateway.cluster.registry import Clusters
from gateway.config.gateway import GatewayConfig
from gateway.config.models import FOLDER, MOST_MODELS, ModelCatalog
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
    """Of names that nodes announce, those that the file does not have and a folder has, with another tokenizer than its own."""
    folder, own = config.models_dir, config.tokenizer_dir
    if folder is None:
        return set()
    catalog = config.catalog
    found = {name: folder / name for name in names if catalog.named(name) is None and FOLDER.fullmatch(name)}
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

    def at(self, now: float, here: Iterable[str], grace_s: float) -> "SeenModels":
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
        self._looked = self._without_folder = frozenset[str]()  # names, as nodes announce them
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
                self._configure(parts)

    async def run(self) -> None:
        """Looks again and again, for ever; at once for nodes of a model that is not known."""
        while True:
            await self._clusters.wait_for(self._is_news, LOOK_S)
            await self.settle()

    async def settle(self) -> None:
        """Has all models be there that can be now, and no others."""
        if self._config.models_dir is not None:
            await self._look()
        catalog = self._catalog()
        self._models.catalog = catalog
        self._clusters.follow(catalog)
        wanted = [each.name for each in catalog.models]
        for parts in list(self._models):
            if parts.key not in wanted:
                log.info("model %s is not served any more", parts.key)
                self._retire(self._models.remove(parts.key))
        for key in wanted:
            if self._again_at.get(key, 0.0) <= self._clock() and self._is_wanted(key):
                await self._add(key)

    async def close(self) -> None:
        """Closes all that it has built."""
        held, self._held = self._held, {}
        for stack in held.values():
            await stack.aclose()

    def _catalog(self) -> ModelCatalog:
        return self._config.catalog.with_found(self._seen.last_seen_s, self._without_folder)

    def _of(self, key: str) -> GatewayConfig:
        return config_of(self._config, self._catalog(), key, self._workers)

    def _configure(self, parts: ModelParts) -> None:
        """Has a model go by what the file says now, but for what only other parts in its place could."""
        made = parts.config
        parts.configure(replace(self._of(parts.key), tokenizer_dir=made.tokenizer_dir, plan=made.plan))

    def _is_wanted(self, key: str) -> bool:
        """Whether parts are to be made for a model: it has none, or has them from another tokenizer or plan service."""
        if self._catalog().by_name(key) is None:  # a reload has come between
            return False
        if (parts := self._models.get(key)) is None:
            return True
        made, wanted = parts.config, self._of(key)
        is_same = (made.tokenizer_dir, made.plan) == (wanted.tokenizer_dir, wanted.plan)
        return not is_same and key in self._held

    async def _look(self) -> None:
        """Learns which of the models that nodes announce have a folder. Those of nodes that are away for a moment count, too."""
        announced = self._announced()
        found = await asyncio.to_thread(brought, self._config, announced)
        here = {name for name in sorted(found) if announced[name]}
        self._seen = self._seen.at(self._clock(), here, self._config.model_grace_s)
        self._looked, self._without_folder = frozenset(announced), frozenset(announced.keys() - found)

    def _is_news(self) -> bool:
        return self._config.models_dir is not None and not self._announced().keys() <= self._looked

    def _announced(self) -> dict[str, bool]:
        """What nodes call their models, and whether one of these is connected."""
        found = dict[str, bool]()
        for node in self._clusters.nodes:
            if node.info is not None:
                found[node.info.model_id] = node.connected or found.get(node.info.model_id, False)
        return found

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
            held = stack.pop_all()
        if (before := self._models.get(key)) is not None:
            self._retire(before)
        self._held[key] = held
        self._models.add(parts)
        if self._catalog().by_name(key) is not None:
            self._configure(parts)  # the file may have changed since
        log.info("model %s is served from now on", key)

    def _retire(self, parts: ModelParts) -> None:
        """Closes parts that no request finds any more, or will find in a moment."""
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

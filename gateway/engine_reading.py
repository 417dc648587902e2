"""Prompts that an engine reads for the gateway: those of styles that it is known to read otherwise (`gateway.styles`).

vLLM's `/render` says which tokens a request stands for, without computing anything. They name the prompt's blocks here, and both
legs of a chat are handed them: neither reads it again, so that both are of the same tokens, whyever they were not.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec import Raw

from gateway.clusters import Clusters
from gateway.errors import LegFailed
from gateway.legs import Legs
from gateway.openai import NOT_JSON, Call, Endpoint
from gateway.prompts import Model, Prompt, PromptMemory, prompt_from
from gateway.read import Reader
from gateway.request import Request, RequestRecord
from gateway.styles import Reading, Styles, style_of
from gateway.tasks import TaskSet
from prompts.segments import TokenArray, token_array

log = logging.getLogger("prfaas.gateway.engine_reading")

MISMATCH: Final = frozenset({"prefill_digest_mismatch", "recompute_digest_mismatch"})
NOT_SERVED: Final = frozenset({404, 405, 501})  # what an engine says of a path that it does not have
NOBODY: Final = "no_node"
ENGINE: Final = "engine"  # how such a prompt was read, for a metric


class _Rendered(msgspec.Struct):
    token_ids: list[int]


_IDS: Final = msgspec.json.Decoder(list[int])
_RENDERED: Final = msgspec.json.Decoder(_Rendered | list[_Rendered])


@dataclass(frozen=True, slots=True)
class Understood:
    """A prompt, by whose reading, and of an engine's its tokens as JSON.

    `failure` is why no engine read it that should have; "" if one did, or need not.
    """

    prompt: Prompt
    reading: Reading = Reading.OWN
    token_ids: Raw | None = None
    failure: str = ""


class EngineReadings:
    """Asks engines where the gateway's own reading is known to be wrong, and learns where it is."""

    def __init__(
        self,
        styles: Styles,
        clusters: Clusters,
        legs: Legs,
        reader: Reader,
        tasks: TaskSet,
        clock: Callable[[], float],
        timeout_s: float,
        *,
        renders_otherwise: bool = False,
    ) -> None:
        """`renders_otherwise`: chats of this model are not rendered by its template, if its engines are vLLM's."""
        self._styles = styles
        self._clusters = clusters
        self._legs = legs
        self._reader = reader
        self._tasks = tasks
        self._clock = clock
        self._timeout_s = timeout_s
        self._renders_otherwise = renders_otherwise

    @property
    def num_styles(self) -> int:
        """Styles that engines are known to read otherwise."""
        return len(self._styles)

    async def understood(self, call: Call, prompt: Prompt, model: Model, tenant: bytes) -> Understood:
        """`prompt`, or what an engine reads in its place. Raises BadRequest."""
        if prompt.is_alone:  # no other node will compute it, whatever it is read as
            return Understood(prompt)
        is_assumed = self._renders_otherwise and call.endpoint is Endpoint.CHAT
        if not self._styles and not is_assumed:  # nothing differs, as far as is known: that costs nothing
            return Understood(prompt)
        style = await self._reader.think(lambda _: style_of(call))
        reading = self._styles.reading(style, self._clock())
        is_assumed = is_assumed and reading is Reading.OWN
        if reading is not Reading.ENGINE and not is_assumed:
            return Understood(prompt, reading)
        try:
            status, answer = await self._rendered(call, model)
        except LegFailed as error:
            return Understood(prompt, Reading.ALONE, failure=error.reason)
        if is_assumed and status in NOT_SERVED:
            log.warning("this model's engines do not say which tokens they read: chats are read by its template")
            self._renders_otherwise = False
            return Understood(prompt)
        if status == 400:  # nor would it compute this; who answers says why
            return Understood(prompt, Reading.ALONE, failure="400")
        if status != 200:
            self._styles.not_read(style, self._clock())
            return Understood(prompt, Reading.ALONE, failure=str(status))

        found = await self._reader.think(lambda memory: _read(answer, call, model, memory, tenant))
        return found or Understood(prompt, Reading.ALONE, failure="bad_answer")

    async def longer(self, token_ids: Raw, call: Call, model: Model, tenant: bytes, answered: Sequence[int]) -> Prompt:
        """The prompt that an engine has read, with what has been `answered` after it. Raises BadRequest."""

        def read(memory: PromptMemory) -> Prompt:
            tokens = token_array(_IDS.decode(token_ids))
            return prompt_from(call, tokens, ENGINE, model, memory, tenant, answered)

        return await self._reader.think(read)

    def ended(self, request: Request, record: RequestRecord, arrived_unix_s: float) -> None:
        """Learns of a request that is over."""
        if not MISMATCH.isdisjoint(request.fallbacks):
            self._tasks.start(self._learn(request.call, request.reading), "learn_style")

    async def _learn(self, call: Call, read: Reading) -> None:
        style = await self._reader.think(lambda _: style_of(call))
        self._styles.differs(style, read, self._clock())
        log.warning("engines read style=%s otherwise than reading=%s", style.hex(), read)

    async def _rendered(self, call: Call, model: Model) -> tuple[int, bytes]:
        nodes = self._clusters.decodes()
        if not nodes:
            raise LegFailed(NOBODY)
        node = min(nodes, key=lambda each: (each.pending_requests, each.load.running))
        body = call.body({"model": model.names[-1]})
        try:
            async with asyncio.timeout(self._timeout_s):
                status, _, answer = await self._legs.ask(node, f"{call.endpoint}/render", body)
        except TimeoutError as error:
            raise LegFailed("timeout") from error
        return status, answer


def _read(answer: bytes, call: Call, model: Model, memory: PromptMemory, tenant: bytes) -> Understood | None:
    tokens = _tokens(answer)
    if tokens is None:
        return None
    # Both legs of a chat take tokens in the place of its messages, and still answer as a chat.
    ids = Raw(msgspec.json.encode(tokens.tolist())) if call.endpoint is Endpoint.CHAT else None
    return Understood(prompt_from(call, tokens, ENGINE, model, memory, tenant), Reading.ENGINE, ids)


def _tokens(answer: bytes) -> TokenArray | None:
    try:
        rendered: Any = _RENDERED.decode(answer)
        (one,) = rendered if isinstance(rendered, list) else [rendered]
        return token_array(one.token_ids)
    except (*NOT_JSON, ValueError, OverflowError):
        return None

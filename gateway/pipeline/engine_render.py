"""Has an engine read prompts for the gateway: those of styles that the engine is known to read otherwise
(`gateway.prompt.tokenizer_trust`).

vLLM's `/render` says which tokens a request stands for, without computing anything. They name the prompt's blocks here, and both
legs of a chat are handed them: neither reads it again, so that both are of the same tokens, whyever they were not.

Prompts with media (`gateway.prompt.media_render`) are read so whenever another node could compute them, and by both legs again:
what each of them makes of the request is compared by its digest.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from gateway.admission.fair_semaphore import FairSemaphore
from gateway.api.openai import NOT_JSON, Call, Endpoint
from gateway.auth.keyring import Tenant
from gateway.cluster.node import ClusterNode
from gateway.errors import LegFailed, Overloaded
from gateway.prompt.media import MediaGuess
from gateway.prompt.media_render import AT_ONCE, MAX_MEDIA, TIMEOUT_S, Worth, seen_in
from gateway.prompt.media_render import MAX_ANSWER_BYTES as MAX_SEEN_BYTES
from gateway.prompt.prompt import Prompt, PromptMemory, PromptModel, prompt_from
from gateway.prompt.reader import PromptReader
from gateway.prompt.tokenizer_trust import Reading, Styles, style_of, style_with_media
from gateway.request.request import Request, RequestRecord
from gateway.tasks import TaskSet
from gateway.upstream.legs import MAX_ANSWER_BYTES, Legs
from planner.decisions.views import Role
from prompts.tokens.segments import TokenArray, token_array

log = logging.getLogger("prfaas.gateway.engine_reading")

# What legs are refused for whose engine reads another prompt, or has no name for its media.
MISMATCH: Final = frozenset(
    {f"{leg}_{why}" for leg in ("prefill", "recompute") for why in ("digest_mismatch", "multimodal")}
)
NOT_SERVED: Final = frozenset({404, 405, 501})  # what an engine says of a path that it does not have
NEVER_SEEN: Final = frozenset({"bad_answer", "kind", "unnamed"})  # of that style
NOBODY: Final = "no_node"
ENGINE: Final = "engine"  # how such a prompt was read, for a metric
SEEN: Final = "seen"  # and one with media


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

    @property
    def fallback(self) -> str:
        """Why its decode node has to compute it whole, for want of a reading; "": it has not."""
        if self.prompt.guess is not None:
            return f"media_{self.failure}" if self.failure else ""
        return f"engine_reading_{self.failure or 'differs'}" if self.reading is Reading.ALONE else ""


class EngineReadings:
    """Asks engines where the gateway's own reading is known to be wrong, and learns where it is."""

    def __init__(
        self,
        styles: Styles,
        ready: Callable[[Role], list[ClusterNode]],
        legs: Legs,
        reader: PromptReader,
        tasks: TaskSet,
        clock: Callable[[], float],
        timeout_s: float,
        threshold_tokens: Callable[[], float],
        *,
        renders_otherwise: bool = False,
    ) -> None:
        """`ready` says which nodes of the model may be asked.

        `renders_otherwise`: chats of this model are not rendered by its template, if its engines are vLLM's.

        Prompts of no more than `threshold_tokens` do not leave their cluster.
        """
        self._styles = styles
        self._ready = ready
        self._legs = legs
        self._reader = reader
        self._tasks = tasks
        self._clock = clock
        self._timeout_s = timeout_s
        self._threshold_tokens = threshold_tokens
        self._renders_otherwise = renders_otherwise
        self._worth = Worth()
        self._turns = FairSemaphore(AT_ONCE)

    @property
    def num_styles(self) -> int:
        """Styles that engines are known to read otherwise."""
        return len(self._styles)

    async def understood(self, call: Call, prompt: Prompt, model: PromptModel, tenant: Tenant) -> Understood:
        """`prompt`, or what an engine reads in its place. Raises BadRequest."""
        if prompt.guess is not None and not prompt.adapter:
            return await self._with_media(call, prompt, prompt.guess, model, tenant)
        if prompt.is_alone:  # no other node will compute it, whatever it is read as
            return Understood(prompt)
        is_assumed = self._renders_otherwise and call.endpoint is Endpoint.CHAT
        if not self._styles and not is_assumed:  # nothing differs, as far as is known: that costs nothing
            return Understood(prompt)
        style = await self._reader.think(lambda _: style_of(call), tenant.share, call.num_bytes)
        reading = self._styles.reading(style, self._clock())
        is_assumed = is_assumed and reading is Reading.OWN
        if reading is not Reading.ENGINE and not is_assumed:
            return Understood(prompt, reading)
        try:
            status, answer = await self._rendered(call, model, self._ready(Role.DECODE))
        except LegFailed as error:
            return Understood(prompt, Reading.ALONE, failure=error.reason)
        if is_assumed and status in NOT_SERVED:
            log.warning("this model's engines cannot render chats: the gateway renders them by the model's template")
            self._renders_otherwise = False
            return Understood(prompt)
        if status == 400:  # nor would it compute this; who answers says why
            return Understood(prompt, Reading.ALONE, failure="400")
        if status != 200:
            self._styles.not_read(style, self._clock())
            return Understood(prompt, Reading.ALONE, failure=str(status))

        def read(memory: PromptMemory) -> Understood | None:
            return _read(answer, call, model, memory, tenant.memory)

        found = await self._reader.think(read, tenant.share, len(answer))
        return found or Understood(prompt, Reading.ALONE, failure="bad_answer")

    async def _with_media(
        self, call: Call, guessed: Prompt, guess: MediaGuess, model: PromptModel, tenant: Tenant
    ) -> Understood:
        if not self._may_leave(guess):
            return Understood(guessed)
        if guess.unread or guess.number > MAX_MEDIA:
            return Understood(guessed, failure=guess.unread or "many")
        style = style_with_media(call)
        if self._styles.reading(style, self._clock()) is Reading.ALONE:
            return Understood(guessed, failure="differs")
        nodes = [node for node in self._ready(Role.DECODE) if _takes_media(node)]
        try:
            async with asyncio.timeout(TIMEOUT_S), self._turns.turn(tenant.name):
                status, answer = await self._rendered(call, model, nodes, MAX_SEEN_BYTES, mm_payload="none")
        except TimeoutError:
            return Understood(guessed, failure="timeout")
        except LegFailed as error:
            return Understood(guessed, failure=error.reason)
        if status != 200:
            if status in NOT_SERVED:
                self._styles.not_read(style, self._clock())
            return Understood(guessed, failure=str(status))

        def read(memory: PromptMemory) -> Understood:
            seen = seen_in(answer, guess.number)
            if seen.failure:
                return Understood(guessed, failure=seen.failure)
            prompt = prompt_from(call, seen.tokens, SEEN, model, memory, tenant.memory, insets=seen.insets)
            return Understood(replace(prompt, caching=guessed.caching), Reading.ENGINE)

        found = await self._reader.think(read, tenant.share, len(answer))
        if found.failure in NEVER_SEEN:
            self._styles.not_read(style, self._clock())
        elif not found.failure:
            self._worth.learn(guess, found.prompt.num_tokens)
        return found

    def _may_leave(self, guess: MediaGuess) -> bool:
        """Whether another node than the one that decodes it may compute a prompt with media, as far as can be said now."""
        able = [node for node in self._ready(Role.PREFILL) if _takes_media(node)]
        homes = {node.cluster for node in self._ready(Role.DECODE)}
        if any(node.cluster in homes for node in able):
            return True
        return bool(able) and self._worth.asks(guess, self._threshold_tokens())

    async def longer(
        self, token_ids: Raw, call: Call, model: PromptModel, tenant: Tenant, answered: Sequence[int]
    ) -> Prompt:
        """The prompt that an engine has read, with what has been `answered` after it. Raises BadRequest."""

        def read(memory: PromptMemory) -> Prompt:
            tokens = token_array(_IDS.decode(token_ids))
            return prompt_from(call, tokens, ENGINE, model, memory, tenant.memory, answered)

        return await self._reader.think(read, tenant.share, len(token_ids))

    def ended(self, request: Request, record: RequestRecord, arrived_unix_s: float) -> None:
        """Learns of a request that is over."""
        if not MISMATCH.isdisjoint(request.progress.fallbacks):
            kind = style_with_media if request.asked.has_media else style_of
            # A gateway that has no room for this reading learns from the next request of the style.
            self._tasks.start(self._learn(request, kind), "learn_style", expected=(Overloaded,))

    async def _learn(self, request: Request, kind: Callable[[Call], bytes]) -> None:
        call = request.call
        style = await self._reader.think(lambda _: kind(call), request.tenant.share, call.num_bytes)
        self._styles.differs(style, request.reading, self._clock())
        log.warning("engines tokenize style=%s differently from reading=%s", style.hex(), request.reading)

    async def _rendered(
        self,
        call: Call,
        model: PromptModel,
        nodes: Sequence[ClusterNode],
        max_bytes: int = MAX_ANSWER_BYTES,
        **values: Any,
    ) -> tuple[int, bytes]:
        if not nodes:
            raise LegFailed(NOBODY)
        node = min(nodes, key=lambda each: (each.pending_requests, each.load.running))
        body = call.written({"model": node.info.model_id if node.info is not None else model.names[-1], **values})
        try:
            async with asyncio.timeout(self._timeout_s):
                status, _, answer = await self._legs.ask(node, f"{call.endpoint}/render", body, max_bytes)
        except TimeoutError as error:
            raise LegFailed("timeout") from error
        return status, answer


def _takes_media(node: ClusterNode) -> bool:
    return node.info is not None and node.info.takes_media


def _read(answer: bytes, call: Call, model: PromptModel, memory: PromptMemory, tenant: bytes) -> Understood | None:
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

"""One picked request, from its body to the engine's answer.

    header names a prefill node ── tokens (engine), place (peer) ── reserve ──┬── leg (peer) ─────► lands here, or is given up
                                                                              └── answer (engine) ── waits for the landing

Whatever fails before the engine's answer: the engine computes the prompt itself, and the fallback is counted with a reason.
The engine loads what has landed only where the digest of its own reading is that of the reservation.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

import aiohttp

from node.agent import NodeAgent
from node.control.call_server import Called
from node.control.holders import MAX_NAME
from node.errors import NodeRefusal, UnansweredCall
from node.picked.answers import STREAM, CachedTokens, as_clients_read, no_prefill
from node.picked.bodies import PickedBody, least_tokens, reason_against_leg, token_ids, with_params
from node.picked.engine_calls import EngineCalls
from node.picked.legs import LegAnswer, PrefillAsked, PrefillPlace, label
from node.picked.peer_calls import PeerCalls
from node.picked.prompt_names import BlockOwner, names_of, owner_of
from node.transfer.incoming import Incoming
from transport.control.messages import TicketInfo
from transport.control.proto import node_pb2 as pb
from transport.control.tickets import ticket_info

log = logging.getLogger(__name__)

PREPARE_S: Final = 90.0  # for all that comes before the two legs
TTL_MARGIN_S: Final = 60.0
DELIVERED_S: Final = 1.0  # until the other node says what has long arrived
BY_ENGINE: Final = ("digest_mismatch", "landing_timeout")  # why it gave a landing up, and the leg fails for it
LOADED: Final = "loaded"  # how a reservation ends whose pages an engine has copied
UNUSED: Final = ("", "request_ended")  # it was refused, or its client has left; "": its engine still lets go of pages
UNOWNED: Final = BlockOwner(b"", "")  # before the first engine


@dataclass(frozen=True, slots=True, kw_only=True)
class PickedRequest:
    """`prefiller` is the address of the node that is to prefill, "" for none; `tenant` takes its turns here and there."""

    id: str
    body: PickedBody
    prefiller: str = ""
    tenant: str = ""


@dataclass(slots=True)
class PendingLanding:
    """A reservation on this node, while the other one prefills. `failure` is why nothing will come; "" while it may."""

    entry: Incoming
    ticket: TicketInfo
    leg: "asyncio.Task[None] | None" = None
    failure: str = ""
    outcome: LegAnswer | None = None

    async def cached_tokens(self) -> int | None:
        """How much of the prompt the other node found cached; None if nothing is known of that."""
        if self.leg is not None:
            await asyncio.wait([self.leg], timeout=DELIVERED_S)
        is_known = self.outcome is not None and self.outcome.delivered and not self.failure
        return self.outcome.cached_tokens if self.outcome is not None and is_known else None

    @property
    def is_whole(self) -> bool:
        """Whether all of it has come, whatever the other node says of it, or fails to say."""
        return self.entry.landed.done() and not self.entry.landed.result()


@dataclass(frozen=True, slots=True)
class PickedAnswer:
    """What the engine answers, and how much of the prompt another node found cached."""

    told: aiohttp.ClientResponse
    cached_tokens: CachedTokens

    def chunks(self) -> AsyncIterator[bytes]:
        """As its client reads it."""
        is_stream = self.told.content_type == STREAM
        return as_clients_read(self.told.content.iter_any(), self.cached_tokens, is_stream=is_stream)


@dataclass(frozen=True, slots=True)
class _Prepared:
    ticket: TicketInfo
    tokens: list[int]
    place: str  # of the node that prefills


class PickedRequests:
    """Asks engine and peers for the requests of one node."""

    def __init__(self, agent: NodeAgent, called: Called, engine: EngineCalls, peers: PeerCalls) -> None:
        self._agent = agent
        self._called = called
        self._engine = engine
        self._peers = peers
        self._leg_s = agent.config.picked_leg_s

    def place(self) -> PrefillPlace:
        """Who this node is to others that ask it for legs."""
        config, pages = self._agent.config, self._agent.pages
        return PrefillPlace(f"{config.cluster}/{config.node_id}", pages.layout.fingerprint if pages is not None else "")

    async def run_leg(self, asked: PrefillAsked) -> LegAnswer:
        """A prefill for another node."""
        try:
            outcome = await self._engine.prefill(asked, self._agent.config.model_name)
        except UnansweredCall as exc:
            outcome = LegAnswer(reason=exc.label)
        except asyncio.CancelledError:
            self._agent.picked.leg_ended("given_up")
            raise
        self._agent.picked.leg_ended("delivered" if outcome.delivered else outcome.reason)
        return outcome

    @asynccontextmanager
    async def answered(self, asked: PickedRequest) -> AsyncIterator[PickedAnswer]:
        """The engine's answer inside the block, once it begins; nothing is left of it afterwards. Raises UnansweredCall."""
        owner = self._owner(asked)
        landing = await self._landing(asked, owner) if asked.prefiller else None
        if landing is None and not asked.prefiller:
            self._agent.picked.requests["plain"] += 1
        try:
            body = with_params(asked.body, self._params(asked, owner, landing), owner.namespace)
            answering = self._engine.answer(asked.body.path, body, asked.id)
            del body  # it may be long, and what follows, too
            async with answering as answer:
                asked.body.let_go()
                yield PickedAnswer(answer, landing.cached_tokens if landing is not None else no_prefill)
        finally:
            if landing is not None:
                await self._end(landing)

    def _owner(self, asked: PickedRequest) -> BlockOwner:
        pages = self._agent.pages
        if pages is None:
            return UNOWNED
        return owner_of(self._agent.naming.secrets, pages.layout.fingerprint, asked.body.cache_salt)

    def _params(self, asked: PickedRequest, owner: BlockOwner, landing: PendingLanding | None) -> dict[str, Any]:
        params: dict[str, Any] = {"salt": owner.salt.hex()}
        if asked.tenant:
            params["tenant"] = asked.tenant
        if landing is not None:
            params |= {"do_remote_prefill": True, "do_remote_decode": False}
            params |= {"transfer_id": landing.ticket.transfer_id, "timeout_s": self._leg_s + TTL_MARGIN_S}
        return params

    async def _landing(self, asked: PickedRequest, owner: BlockOwner) -> PendingLanding | None:
        """A reservation that the named node fills; None, counted: the engine computes the prompt."""
        try:
            async with asyncio.timeout(PREPARE_S):
                prepared = await self._prepared(asked, owner)
        except (UnansweredCall, NodeRefusal) as exc:
            log.info("id=%s is not handed over to %s: %s", asked.id, asked.prefiller, exc)
            self._agent.picked.fell_back(exc.label)
            return None
        except TimeoutError:
            self._agent.picked.fell_back("timeout")
            return None
        if prepared is None:  # there is nothing to send
            self._agent.picked.requests["cached"] += 1
            return None
        ticket = prepared.ticket
        leg = PrefillAsked(
            request_id=asked.id,
            tokens=prepared.tokens,
            ticket=ticket,
            salt=owner.salt.hex(),
            namespace=owner.namespace,
            tenant=asked.tenant,
        )
        entry = self._agent.known(self._agent.incoming).find(ticket.transfer_id)
        landing = PendingLanding(entry, ticket)
        following = self._follow(landing, asked.prefiller, prepared.place, leg)
        landing.leg = asyncio.create_task(following, name="picked leg")
        return landing

    async def _prepared(self, asked: PickedRequest, owner: BlockOwner) -> _Prepared | None:
        """A ticket for the tokens of a prompt; None: this node has all of it. Raises UnansweredCall, NodeRefusal."""
        most = self._agent.describe().max_model_len
        _check_length(least_tokens(asked.body), most)
        if reason := reason_against_leg(asked.body, self._agent.config.model_name):
            raise NodeRefusal(reason)
        incoming = self._agent.known(self._agent.incoming)
        placing = asyncio.create_task(self._peers.place(asked.prefiller), name="picked place")
        try:
            tokens = await self._tokens(asked)
            peer = await placing
        finally:
            placing.cancel()
            await asyncio.gather(placing, return_exceptions=True)
        if peer.layout_fingerprint != incoming.layout.fingerprint:
            raise NodeRefusal("layout_mismatch", f"{peer.place} has another layout, or no engine yet")
        _check_length(len(tokens), most)
        if len(tokens) < 2:
            return None
        names = await names_of(tokens, incoming.layout.block_size, owner.salt)
        request = pb.ReserveRequest(
            request_id=asked.id,
            block_hashes=names.hashes,
            num_tokens=names.num_tokens - 1,  # the engine computes the last one itself
            tokens_digest=names.digest,
            ttl_s=self._leg_s + TTL_MARGIN_S,
            tenant=asked.tenant,
            sender=peer.place,
        )
        ticket = ticket_info(await self._called.reserve(request))
        if ticket.have_tokens >= ticket.num_tokens:
            self._give_back(ticket.transfer_id, "given_up")
            return None
        return _Prepared(ticket, tokens, peer.place)

    async def _tokens(self, asked: PickedRequest) -> list[int]:
        ids = token_ids(asked.body)
        if ids is not None:
            return ids
        return await self._engine.tokens(asked.body.path, with_params(asked.body, {}, ""))

    async def _follow(self, landing: PendingLanding, prefiller: str, place: str, asked: PrefillAsked) -> None:
        """Has the other node prefill. If nothing will come, the landing is given up, and the engine computes the prompt."""
        try:
            async with asyncio.timeout(self._leg_s):
                outcome = await self._peers.prefill(prefiller, place, asked, self._leg_s)
            landing.outcome = outcome
            reason = "" if outcome.delivered else label(outcome.reason) or "not_delivered"
            if outcome.delivered and not await self._has_landed(landing):
                reason = "not_landed"
        except (UnansweredCall, NodeRefusal) as exc:
            reason = exc.label
        except TimeoutError:
            reason = "timeout"
        except Exception:
            log.exception("id=%s", asked.request_id)
            reason = "internal"
        if reason and not landing.is_whole:
            log.info("id=%s nothing comes from %s: %s", asked.request_id, prefiller, reason)
            ended = landing.entry.ended
            landing.failure = ended if ended in BY_ENGINE else f"prefill_{reason}"
            self._give_back(landing.ticket.transfer_id, "prefill_failed")

    async def _has_landed(self, landing: PendingLanding) -> bool:
        """Whether all of it is here, as the other node says: the last bytes are verified before it does."""
        try:
            async with asyncio.timeout(DELIVERED_S):
                return not await asyncio.shield(landing.entry.landed)
        except TimeoutError:
            return False

    async def _end(self, landing: PendingLanding) -> None:
        """Nothing of it goes on: no leg, no landing; then what came of it is counted."""
        self._give_back(landing.ticket.transfer_id, "request_ended")
        try:
            if landing.leg is not None and landing.entry.ended == LOADED:
                await asyncio.wait([landing.leg], timeout=DELIVERED_S)
        finally:  # its client may leave even now
            if landing.leg is not None:
                landing.leg.cancel()
            self._count(landing)
        if landing.leg is not None:
            await asyncio.wait([landing.leg])

    def _count(self, landing: PendingLanding) -> None:
        counts, ended = self._agent.picked, landing.entry.ended
        if landing.failure:
            counts.fell_back(landing.failure)
        elif ended == LOADED:
            counts.requests["handed_over"] += 1
        elif ended in UNUSED:
            counts.requests["ended"] += 1
        else:
            counts.fell_back(ended)

    def _give_back(self, transfer_id: str, reason: str) -> None:
        self._called.abort(pb.AbortRequest(transfer_id=transfer_id, reason=reason))


def _check_length(num_tokens: int, max_model_len: int) -> None:
    """Raises NodeRefusal for a prompt that the engine is going to refuse: neither pages nor another node work for it."""
    if max_model_len and num_tokens >= max_model_len:
        raise NodeRefusal("too_long", f"{num_tokens} tokens, of {max_model_len} at most with the answer's first")


def tenant_of(header: str) -> str:
    """Whose turn a request takes, by a header that a proxy passes on; "" for none. A long name is told by its digest."""
    said = header.strip().encode("utf-8", "replace")
    return said.decode() if len(said) <= MAX_NAME else sha256(said).hexdigest()

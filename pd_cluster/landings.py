"""Landings for decode: KVCache that other nodes sent, handed to the engine that asks for it by transfer id.

ClaimLanding ── wait until all has landed ──► JobPages ── the engine copies the pages ──► EndJob(loaded) ── given back
                     └ never will, or other tokens ──► Refused: the engine computes the prompt itself
"""

import asyncio
from collections import Counter
from typing import Final

from hybrid_cache.cache.reservation import Reservation
from node.errors import NodeRefusal
from node.transfer.job_replies import OK, JobKey, JobReplies, Reply, job_pages, noting_refusals
from pd_cluster.reservations import DecodePages, ReservedDecode
from transport.control import messages as m
from transport.control.proto import node_pb2 as pb

LANDING: Final = "landing"  # the kind of an engine's job that loads one
MAX_CLAIM_S: Final = 3600.0


class DecodeLandings:
    """Reservations for decode that engines claim, load and give back."""

    def __init__(self, reservations: DecodePages) -> None:
        self._reservations = reservations
        self._claims = JobReplies()
        self._loading: dict[JobKey, ReservedDecode] = {}
        self.refused = self._claims.refused
        self.jobs: Counter[tuple[str, str]] = Counter()  # by kind and outcome
        self.loaded_tokens = 0

    @property
    def waiting(self) -> int:
        """Claims that have no answer yet."""
        return len(self._claims)

    @property
    def expects_decodes(self) -> bool:
        """Whether there is a reservation for decode, or one is being made."""
        return self._reservations.expects_decodes

    async def reserve(self, request: pb.ReserveRequest) -> tuple[str, bytes, Reservation]:
        """Reserve pages for a decode and expect their bytes. Raises NodeRefusal."""
        return await self._reservations.reserve(request)

    def claim(self, message: m.ClaimLanding, owner: object, reply: Reply) -> None:
        """Answer with JobPages once everything landed, or Refused. Raises MessageError for a name in use."""
        key = (id(owner), message.job)
        if key in self._claims or key in self._loading:
            raise m.MessageError(f"job {message.job!r} has claimed already")
        noting = noting_refusals(reply, lambda reason: self._refused(key, reason))
        self._claims.start(key, lambda: self._claim(key, message), noting)

    def _refused(self, key: JobKey, reason: str) -> None:
        """An engine cannot give back what it was never told of."""
        self._ended(reason)
        if reserved := self._loading.pop(key, None):
            self._reservations.give_back(reserved, reason)

    async def _claim(self, key: JobKey, message: m.ClaimLanding) -> m.JobPages:
        reserved = self._reservations.find(message.transfer_id)
        if reserved.entry.tokens_digest != message.tokens_digest:
            self._reservations.give_up(reserved, "digest_mismatch")
            raise NodeRefusal("digest_mismatch", "the reservation was made for other tokens")
        with self._reservations.claimed(reserved):
            await self._landed(reserved, message.timeout_s)
        self._reservations.lend(reserved)
        self._loading[key] = reserved
        return job_pages(message.job, reserved.entry.reservation, exact=reserved.use.is_reusable)

    async def _landed(self, reserved: ReservedDecode, timeout_s: float) -> None:
        """Wait until all of it is there. Raises NodeRefusal."""
        # No event loop takes "not a number" or "for ever" as a time.
        timeout_s = min(timeout_s, MAX_CLAIM_S) if timeout_s > 0 else 0.0
        try:
            # Not wait_for: up to Python 3.11 it swallows a cancellation that meets the result, and the pages would be
            # lent to a job that has ended.
            async with asyncio.timeout(timeout_s):
                reason = await asyncio.shield(reserved.entry.landed)
        except TimeoutError:
            self._reservations.give_up(reserved, "landing_timeout")
            raise NodeRefusal("landing_timeout", f"not complete after {timeout_s:.1f}s") from None
        if reason:
            raise NodeRefusal(reason)

    def end(self, message: m.EndJob, owner: object) -> None:
        """The engine copied the pages, or gave the job up."""
        key = (id(owner), message.job)
        self._claims.cancel(key)
        if reserved := self._loading.pop(key, None):
            reason = message.reason or "engine_ended"
            self._ended(OK if message.loaded else reason)
            self.loaded_tokens += reserved.entry.reservation.num_tokens if message.loaded else 0
            self._reservations.give_back(reserved, "loaded" if message.loaded else reason)

    def engine_gone(self, owner: object) -> None:
        """The engine died: reservations that it was loading end. Others wait for its successor or their lease."""
        self._claims.cancel_all(id(owner))
        for key in [key for key in self._loading if key[0] == id(owner)]:
            self._ended("engine_gone")
            self._reservations.give_back(self._loading.pop(key), "engine_gone")

    def _ended(self, outcome: str) -> None:
        self.jobs[LANDING, outcome] += 1

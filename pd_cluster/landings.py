"""Landings for decode: KVCache that other nodes sent, handed to the engine that asks for it by transfer id.

ClaimLanding ── wait until all has landed ──► JobPages ── the engine copies the pages ──► EndJob(loaded) ── given back
                     └ never will, or other tokens ──► Refused: the engine computes the prompt itself
"""

import asyncio
from collections import Counter
from typing import Final

from node.errors import NodeRefusal
from node.transfer.incoming import Consumer, Incoming
from node.transfer.job_replies import OK, JobKey, JobReplies, Reply, job_pages, noting_refusals
from transport.control import messages as m

LANDING: Final = "landing"  # the kind of an engine's job that loads one
MAX_CLAIM_S: Final = 3600.0


class DecodeLandings:
    """What engines of a PD node have claimed of the node's reservations."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._claims = JobReplies()
        self._loading: dict[JobKey, Incoming] = {}
        self.refused = self._claims.refused
        self.jobs: Counter[tuple[str, str]] = Counter()  # by kind and outcome
        self.loaded_tokens = 0

    @property
    def waiting(self) -> int:
        """Claims that have no answer yet."""
        return len(self._claims)

    def claim(self, message: m.ClaimLanding, owner: object, reply: Reply) -> None:
        """Answers with JobPages once everything landed, or Refused. Raises MessageError for a name in use."""
        key = (id(owner), message.job)
        if key in self._claims or key in self._loading:
            raise m.MessageError(f"job {message.job!r} has claimed already")
        noting = noting_refusals(reply, lambda reason: self._refused(key, reason))
        self._claims.start(key, lambda: self._claim(key, message), noting)

    def _refused(self, key: JobKey, reason: str) -> None:
        """What an engine has not been told of it cannot give back."""
        self._ended(reason)
        if entry := self._loading.pop(key, None):
            self._consumer.give_back(entry, reason)

    async def _claim(self, key: JobKey, message: m.ClaimLanding) -> m.JobPages:
        entry = self._consumer.find(message.transfer_id)
        if entry.tokens_digest != message.tokens_digest:
            self._consumer.give_up(entry, "digest_mismatch")
            raise NodeRefusal("digest_mismatch", "the reservation was made for other tokens")
        with self._consumer.claimed(entry):
            await self._landed(entry, message.timeout_s)
        self._consumer.lend(entry)
        self._loading[key] = entry
        return job_pages(message.job, entry.reservation, exact=entry.reusable)

    async def _landed(self, entry: Incoming, timeout_s: float) -> None:
        """Waits until all of it is there. Raises NodeRefusal."""
        # No event loop takes "not a number" or "for ever" as a time.
        timeout_s = min(timeout_s, MAX_CLAIM_S) if timeout_s > 0 else 0.0
        try:
            # Not wait_for: up to Python 3.11 it swallows a cancellation that meets the result, and the pages would be
            # lent to a job that has ended.
            async with asyncio.timeout(timeout_s):
                reason = await asyncio.shield(entry.landed)
        except TimeoutError:
            self._consumer.give_up(entry, "landing_timeout")
            raise NodeRefusal("landing_timeout", f"not complete after {timeout_s:.1f}s") from None
        if reason:
            raise NodeRefusal(reason)

    def end(self, message: m.EndJob, owner: object) -> None:
        """The engine copied the pages, or gave the job up."""
        key = (id(owner), message.job)
        self._claims.cancel(key)
        if entry := self._loading.pop(key, None):
            reason = message.reason or "engine_ended"
            self._ended(OK if message.loaded else reason)
            self.loaded_tokens += entry.reservation.num_tokens if message.loaded else 0
            self._consumer.give_back(entry, "loaded" if message.loaded else reason)

    def engine_gone(self, owner: object) -> None:
        """The engine died: reservations it was loading go; others wait for its successor or their lease."""
        self._claims.cancel_all(id(owner))
        for key in [key for key in self._loading if key[0] == id(owner)]:
            self._ended("engine_gone")
            self._consumer.give_back(self._loading.pop(key), "engine_gone")

    def _ended(self, outcome: str) -> None:
        self.jobs[LANDING, outcome] += 1

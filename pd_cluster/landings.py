"""Landings for decode: KVCache that other nodes sent, handed to the engine that asks for it by transfer id.

ClaimLanding ── wait until all has landed ──► JobPages ── the engine copies the pages ──► EndJob(loaded) ── given back
                     └ never will, or other tokens ──► Refused: the engine computes the prompt itself
"""

from collections import Counter

from node.answers import OK, Answers, JobKey, Reply, job_pages, noting_refusals
from node.consumer import Consumer, Incoming
from transport.control import messages as m

LANDING = "landing"  # the kind of an engine's job that loads one


class DecodeLandings:
    """What engines of a PD node have claimed of the node's reservations."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._claims = Answers()
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
        self._claims.start(key, lambda: self._claim(key, message), noting_refusals(reply, self._ended))

    async def _claim(self, key: JobKey, message: m.ClaimLanding) -> m.JobPages:
        entry = await self._consumer.lend(message.transfer_id, message.tokens_digest, message.timeout_s)
        self._loading[key] = entry
        return job_pages(message.job, entry.reservation, exact=entry.reusable)

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

"""Many requests at once, each given up at a random moment: those that finish get the right bytes, nothing stays behind."""

import asyncio
import random
from pathlib import Path

import pytest

from node.errors import NodeRefusal
from tests.pd_cluster.handover import HandNode, run, two_nodes
from transport.control import messages as m

REQUESTS = 60
MAX_PAUSE_S = 0.004


class Storm:
    """One request after another, with accidents."""

    def __init__(self, prefill: HandNode, decode: HandNode, rng: random.Random) -> None:
        self._prefill, self._decode, self._rng = prefill, decode, rng
        self.arrived = 0

    async def request(self, number: int) -> None:
        tokens = [self._rng.randrange(3)] * 16 + [number] * self._rng.randrange(2, 60)
        job = f"job{number}"
        try:
            ticket = self._decode.reserve(tokens)
        except NodeRefusal:
            return
        await asyncio.gather(self._prefill_leg(job, tokens, ticket), self._decode_leg(job, tokens, ticket))
        self._decode.incoming.abort(ticket.transfer_id, "request_ended")

    async def _prefill_leg(self, job: str, tokens: list[int], ticket: m.TicketInfo) -> None:
        answers: asyncio.Queue[m.AgentMessage] = asyncio.Queue()
        self._prefill.begin(job, tokens, len(tokens) - 1, ticket, answers.put_nowait)
        try:
            async with asyncio.timeout(self._patience()):
                pages = await answers.get()
                if not isinstance(pages, m.JobPages):
                    return
                await self._pause()
                self._prefill.compute(pages, tokens)
                await answers.get()
        except TimeoutError:
            # As a gateway does: the decode node need not wait any longer.
            self._decode.incoming.abort(ticket.transfer_id, "prefill_failed")
        finally:
            self._prefill.end(job)

    async def _decode_leg(self, job: str, tokens: list[int], ticket: m.TicketInfo) -> None:
        answers: asyncio.Queue[m.AgentMessage] = asyncio.Queue()
        self._decode.claim_as(job, ticket, tokens, answers.put_nowait)
        try:
            async with asyncio.timeout(self._patience()):
                pages = await answers.get()
            if isinstance(pages, m.JobPages):
                await self._pause()
                self._decode.check(pages, tokens)
                self.arrived += 1
        except TimeoutError:
            pass
        finally:
            self._decode.end(job, loaded=True)

    def _patience(self) -> float:
        return self._rng.choice([30.0, 30.0, self._rng.uniform(0.0, 4 * MAX_PAUSE_S)])

    async def _pause(self) -> None:
        await asyncio.sleep(self._rng.uniform(0.0, MAX_PAUSE_S))


@pytest.mark.parametrize("use_shm", [False, True], ids=["tcp", "shm"])
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_left_behind(tmp_path: Path, use_shm: bool, seed: int) -> None:
    async def scenario() -> None:
        rng = random.Random(seed)
        async with two_nodes(tmp_path, use_shm=use_shm) as (prefill, decode):
            storm = Storm(prefill, decode, rng)
            for start in range(0, REQUESTS, 12):
                await asyncio.gather(*(storm.request(number) for number in range(start, start + 12)))
            assert storm.arrived > REQUESTS // 10
            prefill.pages.cache.check_integrity()
            decode.pages.cache.check_integrity()

    run(scenario())

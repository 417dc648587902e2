"""Pages of a device that does later what it is given: read after it was waited for, and written before anybody hears of it."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.agent.job_pages import JobKV
from engine.sglang.disaggregation.handoff import PageChunk, ReceivingHandoff, SendingHandoff
from engine.sglang.disaggregation.pools import Buffer, Pools, layout_of
from tests.engine.builders import arena_for, job_pages
from transport.control.messages import TicketInfo

PAGE, PAGES, ITEM, BUFFERS = 4, 9, 32, 3
LAYOUT = layout_of(
    "m",
    Pools(
        buffers=(Buffer(pointer=0, num_bytes=PAGES * ITEM, item_bytes=ITEM),) * BUFFERS,
        page_tokens=PAGE,
        dtype="u8",
        device="cpu",
    ),
)
CHOSEN = np.array([7, 2, 5, 0, 8], np.int32)
TICKET = TicketInfo(
    transfer_id="t",
    secret=b"s",
    num_tokens=len(CHOSEN) * PAGE,
    have_tokens=0,
    tokens_digest=b"",
    endpoints=(),
    ttl_s=60.0,
    layout_fingerprint="l",
    node_id="n",
    cluster="c",
)


class LazyPool:
    """Does what it was given when it is waited for."""

    def __init__(self) -> None:
        self.memory = np.zeros((BUFFERS, PAGES, ITEM), np.uint8)
        self.given: list[Callable[[], None]] = []
        self.waits = 0

    def __len__(self) -> int:
        return BUFFERS

    def select(self, pages: NDArray[np.int32]) -> NDArray[np.int64]:
        return pages.astype(np.int64)

    def read(self, buffer: int, index: NDArray[np.int64]) -> NDArray[np.uint8]:
        return self.memory[buffer][index].reshape(len(index) * PAGE, -1)

    def write(self, buffer: int, index: NDArray[np.int64], tokens: NDArray[np.uint8]) -> None:
        rows = tokens.reshape(len(index), -1).copy()
        self.given.append(lambda: self.memory[buffer].__setitem__(index, rows))

    def wait(self) -> None:
        self.waits += 1
        while self.given:
            self.given.pop(0)()


class ReservedAtOnce:
    """Reservations of an agent that has room."""

    async def reserve(self, *_: Any) -> TicketInfo:
        return TICKET

    async def abort(self, _: str) -> None:
        pass


def job_kv(kind: type[JobKV] = JobKV) -> JobKV:
    pages = job_pages(LAYOUT, len(CHOSEN) * PAGE)
    return kind(LAYOUT, arena_for(LAYOUT, pages), pages)


def agent_of(kv: JobKV) -> Any:
    """An agent's thread that is this loop, and lends these pages."""

    async def pages() -> JobKV:
        return kv

    loop = asyncio.get_running_loop()
    delivered = loop.create_future()
    job = SimpleNamespace(
        pages=pages,
        delivered=lambda: delivered,
        prefill_done=lambda *_: delivered.set_result(None),
        end=lambda **_: None,
    )
    link = SimpleNamespace(begin_prefill=lambda *_: job, claim_landing=lambda *_: job)
    return SimpleNamespace(later=loop.call_soon_threadsafe, layout=LAYOUT, link=link)


def content() -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(1, 256, (BUFFERS, len(CHOSEN), ITEM)).astype(np.uint8)


def test_pages_are_read_once_the_device_has_computed_them_by_one_wait() -> None:
    async def scenario() -> None:
        pool, kv, computed, ended = LazyPool(), job_kv(), content(), asyncio.Event()
        pool.given.append(lambda: pool.memory.__setitem__((slice(None), CHOSEN), computed))
        sending = SendingHandoff(agent_of(kv), pool, "r", TICKET, lambda reason: (reasons.append(reason), ended.set()))
        sending.put(PageChunk(0, CHOSEN, is_last=True))
        async with asyncio.timeout(60.0):
            await ended.wait()
        assert (reasons, pool.waits) == ([""], 1)
        for buffer in range(BUFFERS):
            rows, _ = kv.read_attention(buffer, 0, len(CHOSEN) * PAGE)
            assert np.array_equal(rows.reshape(len(CHOSEN), ITEM), computed[buffer])

    reasons: list[str] = []
    asyncio.run(scenario())


def test_pages_are_written_before_their_request_hears_of_it_by_one_wait() -> None:
    async def scenario() -> None:
        pool, kv, landed, ended = LazyPool(), job_kv(), content(), asyncio.Event()
        for buffer in range(BUFFERS):
            kv.write_attention(buffer, 0, landed[buffer].reshape(-1, ITEM // PAGE), np.empty((20, 0), np.uint8))

        def on_end(reason: str) -> None:
            written.append((reason, np.array_equal(pool.memory[:, CHOSEN], landed)))
            ended.set()

        ReceivingHandoff(
            agent_of(kv),
            pool,
            ReservedAtOnce(),
            "r",
            CHOSEN,
            timeout_s=60.0,
            on_ticket=lambda _: None,
            on_end=on_end,
        )
        async with asyncio.timeout(60.0):
            await ended.wait()
        assert (written, pool.waits) == ([("", True)], 1)

    written: list[tuple[str, bool]] = []
    asyncio.run(scenario())


def test_nothing_is_under_way_once_a_landing_is_given_up() -> None:
    class GivenUpHalfWay(JobKV):
        def read_attention(self, layer: int, start: int, stop: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
            if layer == 1:
                assert pool.given
                landing.give_up()
                under_way.append(len(pool.given))
            return super().read_attention(layer, start, stop)

    async def scenario() -> None:
        nonlocal landing
        landing = ReceivingHandoff(
            agent_of(job_kv(GivenUpHalfWay)),
            pool,
            ReservedAtOnce(),
            "r",
            CHOSEN,
            timeout_s=60.0,
            on_ticket=lambda _: None,
            on_end=lambda reason: under_way.append(-1),
        )
        async with asyncio.timeout(60.0):
            while pool.waits < 2:  # noqa: ASYNC110 the second is that of the copying thread, at its end
                await asyncio.sleep(0)
        assert under_way == [0]

    pool, under_way = LazyPool(), list[int]()
    landing: Any = None
    asyncio.run(scenario())

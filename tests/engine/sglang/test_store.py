"""Blocks over a small agent: kept, found, read back; and what comes of an agent that is not there, or refuses."""

import asyncio
import contextlib
import os
import threading

import numpy as np
import pytest

from engine.agent.link import AgentJob
from engine.sglang.layout import layout_of
from engine.sglang.store import BlockStore
from tests.engine.mini_agent import MiniAgent
from tests.engine.running import PATIENCE_S, until
from tests.engine.sglang.test_layout import POOL

LAYOUT = layout_of("m", POOL)
SIZE = LAYOUT.block_size
ROW = POOL.heads * POOL.head_elements * POOL.item_bytes


class Server:
    """What a server holds: K and V of each layer, row by row."""

    def __init__(self, num_blocks, seed=0):
        rng = np.random.default_rng(seed)
        shape = (POOL.layers, num_blocks * SIZE, ROW)
        self.k, self.v = rng.integers(0, 256, shape, np.uint8), rng.integers(0, 256, shape, np.uint8)

    def give(self, layer, start, stop):
        return self.k[layer, start:stop], self.v[layer, start:stop]

    def take(self, layer, start, k, v):
        self.k[layer, start : start + len(k)], self.v[layer, start : start + len(v)] = k, v


class Loop:
    """An event loop of the agent's on a thread of its own: the store's calls wait."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE_S)

    def close(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(PATIENCE_S)
        self.loop.close()


@pytest.fixture
def loop():
    loop = Loop()
    yield loop
    loop.close()


@contextlib.contextmanager
def joined(tmp_path, loop, num_pages=64, **options):
    agent = MiniAgent(tmp_path, LAYOUT, num_pages=num_pages)
    loop.run(agent.start())
    store = BlockStore(agent.socket, LAYOUT, model_id="m", max_model_len=100, http_url="http://here", **options)
    store.start()
    try:
        assert store.wait_connected(PATIENCE_S)
        yield agent, store
    finally:
        store.close()
        loop.run(agent.stop())


def names(num_blocks, seed=b"n"):
    return [seed.ljust(31, b".") + bytes([index]) for index in range(num_blocks)]


def test_what_was_kept_is_read_back(tmp_path, loop):
    with joined(tmp_path, loop) as (_, store):
        wrote, read, chain = Server(4), Server(4, seed=1), names(4)
        assert store.cached_blocks(chain) == 0
        assert store.save(chain, 0, wrote.give)
        assert store.cached_blocks(chain) == 4
        assert store.load(chain, 0, read.take) == 4
        np.testing.assert_array_equal(read.k, wrote.k)
        np.testing.assert_array_equal(read.v, wrote.v)
        assert not store.counts


def test_a_prompt_is_kept_and_read_in_parts(tmp_path, loop):
    with joined(tmp_path, loop) as (_, store):
        wrote, read, chain = Server(4), Server(4, seed=1), names(4)
        assert store.save(chain[:2], 0, wrote.give)
        assert store.save(chain, 2, wrote.give)
        assert store.load(chain, 1, read.take) == 3
        np.testing.assert_array_equal(read.k[:, SIZE:], wrote.k[:, SIZE:])
        assert not np.array_equal(read.k[:, :SIZE], wrote.k[:, :SIZE])  # not asked for


def test_only_the_beginning_that_is_cached_is_handed_over(tmp_path, loop):
    with joined(tmp_path, loop) as (_, store):
        wrote, chain = Server(4), names(4)
        assert store.save(chain[:2], 0, wrote.give)
        taken = []
        assert store.load(chain, 0, lambda layer, start, k, v: taken.append((layer, start, len(k)))) == 2
        assert taken == [(layer, 0, 2 * SIZE) for layer in range(POOL.layers)]
        assert store.load(chain, 2, lambda *_: taken.append(())) == 0
        assert len(taken) == POOL.layers


def test_pages_without_those_before_them_are_not_kept(tmp_path, loop):
    with joined(tmp_path, loop) as (_, store):
        assert not store.save(names(4), 2, Server(4).give)
        assert store.cached_blocks(names(4)) == 0
        assert store.counts == {"save_prefix_not_cached": 1}


def test_what_is_kept_already_is_not_copied_again(tmp_path, loop):
    with joined(tmp_path, loop) as (_, store):
        assert store.save(names(3), 0, Server(3).give)
        assert store.save(names(3), 0, lambda *_: pytest.fail("copied again"))


def test_a_server_that_fails_to_copy_keeps_nothing(tmp_path, loop):
    def fails(layer, start, stop):
        raise RuntimeError("no such rows")

    with joined(tmp_path, loop) as (_, store):
        with pytest.raises(RuntimeError):
            store.save(names(2), 0, fails)
        assert store.cached_blocks(names(2)) == 0


def test_without_room_nothing_is_kept_and_it_is_counted(tmp_path, loop):
    heard = []
    options = {"num_pages": LAYOUT.pages_per_block(0), "on_fallback": lambda *what: heard.append(what)}
    with joined(tmp_path, loop, **options) as (_, store):
        assert not store.save(names(2), 0, Server(2).give)
        assert store.counts == {"save_no_capacity": 1}
        assert heard == [("save", "no_capacity")]


def test_without_an_agent_nothing_is_cached(tmp_path):
    store = BlockStore(tmp_path / "nobody", LAYOUT, model_id="m", max_model_len=100, http_url="http://here")
    store.start()
    try:
        assert store.cached_blocks(names(2)) == 0
        assert not store.save(names(2), 0, Server(2).give)
        assert store.load(names(2), 0, Server(2).take) == 0
        assert store.counts == {"lookup_agent_gone": 1, "save_agent_gone": 1, "load_agent_gone": 1}
    finally:
        store.close()
    assert store.cached_blocks(names(2)) == 0  # closed


def test_an_agent_that_does_not_answer_is_not_waited_for(tmp_path, loop):
    with joined(tmp_path, loop, answer_timeout_s=0.05) as (agent, store):
        agent.deaf_to_answers = True
        assert not store.save(names(2), 0, Server(2).give)
        assert store.counts == {"save_TimeoutError": 1}


def test_pages_that_come_when_nobody_waits_any_more_are_given_back(tmp_path, loop, monkeypatch):
    pages, is_over = AgentJob.pages, threading.Event()

    async def late(job):
        kv = await pages(job)
        is_over.wait(PATIENCE_S)  # the loop's thread has them, and gets no further before the caller gives up
        return kv

    monkeypatch.setattr(AgentJob, "pages", late)
    with joined(tmp_path, loop, answer_timeout_s=0.05) as (agent, store):
        assert store.cached_blocks(names(2)) == 0
        is_over.set()

        async def is_free():
            await until(lambda: agent.ended)
            return agent.cache.report().reservations

        assert loop.run(is_free()) == 0


def test_pages_that_were_borrowed_are_given_back(tmp_path, loop):
    with joined(tmp_path, loop) as (agent, store):
        store.save(names(2), 0, Server(2).give)
        store.load(names(2), 0, Server(2).take)
        store.cached_blocks(names(3))

        async def is_free():
            await until(lambda: len(agent.ended) == 3)
            return agent.cache.report().reservations

        assert loop.run(is_free()) == 0
        assert {ended.job.split("-")[0] for ended in agent.ended} == {str(os.getpid())}

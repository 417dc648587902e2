"""Batches of one-sided writes."""

import time
from dataclasses import replace

import pytest

from tests.transport.helpers import random_bytes
from transport.batch import BatchEngine, TaskState, Write
from transport.client import ClientOptions
from transport.errors import LocalProtocolError


def wait(engine: BatchEngine, batch: int) -> TaskState:
    deadline = time.monotonic() + 10
    while (state := engine.batch_status(batch)) is TaskState.PENDING:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return state


def test_writes_land_where_they_were_meant_to() -> None:
    source, target = random_bytes(1 << 20), bytearray(2 << 20)
    with BatchEngine() as near, BatchEngine() as far:
        ref = far.register_memory("kv", memoryview(target))
        batch = near.allocate_batch(8)
        view = memoryview(source)
        near.submit(batch, [Write(view[i << 17 : (i + 1) << 17], ref, (7 - i) << 18) for i in range(8)])
        assert wait(near, batch) is TaskState.COMPLETED
        for i in range(8):
            assert near.status(batch, i).transferred_bytes == 1 << 17
            assert target[(7 - i) << 18 : ((7 - i) << 18) + (1 << 17)] == source[i << 17 : (i + 1) << 17]
        near.free_batch(batch)
        with pytest.raises(LocalProtocolError, match="no batch"):
            near.status(batch, 0)


def test_every_task_has_its_own_status() -> None:
    with BatchEngine(client_options=ClientOptions(peer_timeout_s=0.3)) as near, BatchEngine() as far:
        good = far.register_memory("good", memoryview(bytearray(100)))
        gone = replace(good, address="127.0.0.1:1")
        batch = near.allocate_batch(2)
        near.submit(batch, [Write(memoryview(b"x" * 10), good, 0), Write(memoryview(b"y" * 10), gone, 0)])
        assert wait(near, batch) is TaskState.FAILED
        assert near.status(batch, 0).state is TaskState.COMPLETED
        assert near.status(batch, 1).reason == "peer_lost"
        near.free_batch(batch)


def test_a_segment_is_written_with_its_secret_and_inside_its_bounds_only() -> None:
    with BatchEngine() as near, BatchEngine() as far:
        ref = far.register_memory("kv", memoryview(bytearray(100)))
        cases = {
            "bad_secret": replace(ref, secret=b"guess"),
            "out_of_bounds": replace(ref, num_bytes=10_000),
            "unknown_transfer": replace(ref, name="other"),
        }
        for reason, wrong in cases.items():
            batch = near.allocate_batch(1)
            near.submit(batch, [Write(memoryview(b"x" * 50), wrong, 80 if reason == "out_of_bounds" else 0)])
            assert wait(near, batch) is TaskState.FAILED
            assert near.status(batch, 0).reason == reason
        far.unregister_memory("kv")
        batch = near.allocate_batch(1)
        near.submit(batch, [Write(memoryview(b"x"), ref, 0)])
        assert wait(near, batch) is TaskState.FAILED


def test_a_batch_has_limits() -> None:
    with BatchEngine() as near, BatchEngine() as far:
        ref = far.register_memory("kv", memoryview(bytearray(100)))
        batch = near.allocate_batch(1)
        write = Write(memoryview(b"x"), ref, 0)
        with pytest.raises(LocalProtocolError, match="at most"):
            near.submit(batch, [write, write])
        with pytest.raises(ValueError, match="leaves segment"):
            near.submit(batch, [Write(memoryview(b"x"), ref, 100)])

"""Two inference engines of your own move KVCache with `transport.batch`: python examples/outside_engine.py

The prefill engine is a process of its own. It writes each layer's pages into pages that the decode engine has chosen,
while it computes the next layer. The decode engine then reads one page back, as it would fetch a cached prefix.

A `SegmentRef` says where memory lies and holds the secret for access. It travels over a channel that both trust: here a pipe.
"""

import os
import time
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection

from transport.batch import BatchEngine, Read, SegmentRef, TaskState, Write

LAYERS = 4
PAGES = 32  # of each engine, in every layer
PAGE_BYTES = 64 * 1024


def offset_of(layer: int, page: int) -> int:
    """Where a page of a layer lies in an engine's memory."""
    return (layer * PAGES + page) * PAGE_BYTES


def page_of(memory: memoryview, layer: int, page: int) -> memoryview:
    start = offset_of(layer, page)
    return memory[start : start + PAGE_BYTES]


def wait(engine: BatchEngine, batch: int, timeout_s: float = 30.0) -> None:
    """Returns when all bytes are where they belong. Raises RuntimeError when a task has failed, TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while (state := engine.batch_status(batch)) is TaskState.PENDING:
        if time.monotonic() > deadline:
            raise TimeoutError("the transfer takes too long")
        time.sleep(0.001)
    if state is TaskState.FAILED:
        raise RuntimeError("the transfer failed; engine.status(batch, task).reason says why")
    engine.free_batch(batch)


def prefill(pipe: Connection) -> None:
    """The prefill engine: computes, writes, and lets its own pages be read."""
    memory = memoryview(bytearray(LAYERS * PAGES * PAGE_BYTES))
    with BatchEngine() as engine:
        own = engine.register_memory("prefill", memory, remote_read=True, remote_write=False)
        target: SegmentRef
        chosen: Sequence[int]
        target, chosen = pipe.recv()
        batch = engine.allocate_batch(LAYERS * len(chosen))
        for layer in range(LAYERS):
            for page in range(len(chosen)):
                page_of(memory, layer, page)[:] = os.urandom(PAGE_BYTES)  # your model computes the layer here
            writes = [
                Write(page_of(memory, layer, page), target, offset_of(layer, there))
                for page, there in enumerate(chosen)
            ]
            engine.submit(batch, writes)
        wait(engine, batch)
        pipe.send((own, bytes(memory)))  # the bytes only so that the other process can compare them
        pipe.recv()  # the decode engine has read what it wanted
        while engine.serving:  # and has said so
            time.sleep(0.001)


def main() -> None:
    """The decode engine."""
    context = get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=prefill, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    memory = memoryview(bytearray(LAYERS * PAGES * PAGE_BYTES))
    chosen = [7, 3, 30, 11, 12]  # pages that are free here, in the order of the prompt
    with BatchEngine() as engine:
        pipe.send((engine.register_memory("decode", memory), chosen))
        source, computed = pipe.recv()
        for layer in range(LAYERS):
            for page, here in enumerate(chosen):
                assert page_of(memory, layer, here) == page_of(memoryview(computed), layer, page)
        print(f"written: {LAYERS * len(chosen)} pages of {PAGE_BYTES} bytes, all equal")

        batch = engine.allocate_batch(1)
        engine.submit(batch, [Read(page_of(memory, 0, 0), source, offset_of(0, 0))])
        wait(engine, batch)
        assert page_of(memory, 0, 0) == page_of(memoryview(computed), 0, 0)
        print("read: 1 page, equal")
        pipe.send("done")
        process.join()


if __name__ == "__main__":
    main()

"""Two ends of a foreign batch backend in one process of their own: their threads outlive an interpreter badly.

python -m tests.transport.batch.backend_ends mooncake|nixl       prints "ok", or a traceback
"""

import os
import sys
import time
import traceback

import numpy as np
import pytest

from transport.batch.engine import BatchTransfer, Read, TaskState, Write
from transport.errors import LocalProtocolError

SIZE = 4 << 20


def backend(name: str) -> BatchTransfer:
    if name == "mooncake":
        from transport.batch.mooncake import MooncakeBatch

        return MooncakeBatch()
    from transport.batch.nixl import NixlBatch

    return NixlBatch()


def finish(end: BatchTransfer, batch: int, num_tasks: int) -> None:
    deadline = time.monotonic() + 60
    while (state := end.batch_status(batch)) is TaskState.PENDING:
        assert time.monotonic() < deadline, "no end"
        time.sleep(0.002)
    statuses = [end.status(batch, task) for task in range(num_tasks)]
    assert state is TaskState.COMPLETED, statuses
    assert sum(status.transferred_bytes for status in statuses) > 0
    end.free_batch(batch)


def check(name: str) -> None:
    near, far = backend(name), backend(name)
    rng = np.random.default_rng(1)
    here, there = np.frombuffer(rng.bytes(SIZE), np.uint8).copy(), np.zeros(SIZE, np.uint8)
    ref = far.register_memory("kv", there.data, remote_read=True, remote_write=True)
    near.register_memory("own", here.data, remote_read=True, remote_write=True)
    part = SIZE // 4
    # four writes, in another order
    batch = near.allocate_batch(4)
    near.submit(batch, [Write(here.data[i * part : (i + 1) * part], ref, (3 - i) * part) for i in range(4)])
    finish(near, batch, 4)
    assert all((there[(3 - i) * part : (4 - i) * part] == here[i * part : (i + 1) * part]).all() for i in range(4))
    # and back, turned round once more
    here[:] = 0
    batch = near.allocate_batch(2)
    near.submit(batch, [Read(here.data[i * part : (i + 1) * part], ref, (1 - i) * part) for i in range(2)])
    finish(near, batch, 2)
    assert (here[:part] == there[part : 2 * part]).all()
    assert (here[part : 2 * part] == there[:part]).all()
    with pytest.raises(LocalProtocolError, match="in no registered memory"):
        near.submit(near.allocate_batch(1), [Write(memoryview(bytearray(10)), ref, 0)])
    near.close()
    far.close()


if __name__ == "__main__":
    try:
        check(sys.argv[1])
        print("ok", flush=True)
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
    os._exit(0)

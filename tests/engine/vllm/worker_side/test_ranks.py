"""Pages are given back only when no rank touches them, no matter how often and from where they are asked for."""

import asyncio
import threading
from pathlib import Path

from engine.vllm.scheduler_side.steps import StepWritten
from engine.vllm.worker_side.ranks import RankLink, RankServer


def test_everybody_who_asks_for_a_job_waits_until_ranks_let_go(tmp_path: Path) -> None:
    asyncio.run(release_twice(tmp_path))


async def release_twice(tmp_path: Path) -> None:
    known, path = asyncio.Event(), tmp_path / "ranks.sock"
    # Soon, which is only when it is complained about.
    server = RankServer(path, lambda rank, message: known.set(), ranks=1, let_go_timeout_s=0.01)
    await server.start()
    copying = threading.Event()
    link = await asyncio.to_thread(RankLink, str(server.path), 0, lambda job: copying.wait(30.0))
    try:
        async with asyncio.timeout(30.0):
            link.send(StepWritten(job="other", num_tokens=1))
            await known.wait()
            asked = [asyncio.create_task(server.release("j")) for _ in range(2)]
            await asyncio.wait(asked, timeout=0.05)
            assert not any(task.done() for task in asked)
            copying.set()
            await asyncio.gather(*asked)
    finally:
        copying.set()
        await asyncio.to_thread(link.close)
        await server.close()


def test_a_rank_that_is_yet_to_come_is_waited_for(tmp_path: Path) -> None:
    asyncio.run(release_before_the_first_step(tmp_path))


async def release_before_the_first_step(tmp_path: Path) -> None:
    server = RankServer(tmp_path / "ranks.sock", lambda rank, message: None, ranks=1)
    await server.start()
    released: list[str] = []
    try:
        async with asyncio.timeout(30.0):
            asked = asyncio.create_task(server.release("j"))
            await asyncio.sleep(0)
            link = await asyncio.to_thread(RankLink, str(server.path), 0, released.append)
            await asked
            assert released == ["j"]
            await asyncio.to_thread(link.close)
    finally:
        await server.close()

"""What an engine is started with, and where it says what."""

import asyncio
import time
from pathlib import Path

import pytest

from engine.vllm.server.seats import Seat
from node.engine.supervisor import EngineSupervisor, engine_environment, shares_server
from node.process.log_rotation import earlier
from tests.node.running import config

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def test_a_directory_needs_no_network(tmp_path: Path) -> None:
    for engine in ("embedded", "emulated"):
        assert engine_environment(config(tmp_path, engine=engine), {}).items() >= OFFLINE.items()
    assert engine_environment(config(tmp_path, engine="vllm", model=str(tmp_path)), {}).items() >= OFFLINE.items()


def test_vllm_may_download_what_a_name_stands_for(tmp_path: Path) -> None:
    assert not engine_environment(config(tmp_path, engine="vllm", model="org/name"), {}).keys() & OFFLINE.keys()


def test_what_the_operator_has_set_wins(tmp_path: Path) -> None:
    ours = {"HF_HUB_OFFLINE": "0", "OMP_NUM_THREADS": "7", "PATH": "/bin"}
    assert engine_environment(config(tmp_path, threads=2), ours).items() >= ours.items()


def test_an_engine_that_reserves_is_told_where(tmp_path: Path) -> None:
    chosen = engine_environment(config(tmp_path, engine="sglang"), {"PRFAAS_AGENT_CONTROL": "other:1"}, "127.0.0.1:2")
    assert chosen["PRFAAS_AGENT_CONTROL"] == "127.0.0.1:2"
    assert "PRFAAS_AGENT_CONTROL" not in engine_environment(config(tmp_path), {}, "127.0.0.1:2")


def test_an_engine_in_a_server_of_several_nodes_is_watched_by_itself(tmp_path: Path) -> None:
    """What rank 0's node has started runs the engines of all: one that is stopped is not that node's. What others have started
    keeps a seat, and runs whatever the engine does."""
    assert all(shares_server(Seat(tmp_path / "a:b", rank, 16).environment()) for rank in (0, 1, 12))
    assert not shares_server({})
    alone = supervisor(tmp_path, tmp_path / "log", "sleep 1", 0)
    assert alone.leader_of(4711)() == alone.pid


def supervisor(tmp_path: Path, log_path: Path, script: str, max_restarts: int) -> EngineSupervisor:
    """Its engine is a script of the shell's, started again at once."""
    return EngineSupervisor(
        config(tmp_path, engine_max_restarts=max_restarts),
        tmp_path / "engine.sock",
        log_path,
        time.monotonic,
        lambda: None,
        command=lambda *_: ["sh", "-c", script],
        first_backoff_s=0.0,
    )


def test_each_start_of_an_engine_has_a_log_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "far-engine.log"
    for words in ("first", "second"):
        asyncio.run(supervisor(tmp_path, path, f"echo {words}; echo {words} >&2", 0).run())
    assert [log.read_text() for log in (path, earlier(path, 1))] == ["second\nsecond\n", "first\nfirst\n"]


@pytest.mark.parametrize(
    ("says", "serves", "starts", "refusal"),
    [
        ("engine: cannot serve: no attention layer", False, 1, "no attention layer"),
        ("ValueError: no such quantisation", False, 1, "ValueError: no such quantisation"),
        ("RuntimeError: size of tensor a", False, 2, "RuntimeError: size of tensor a"),
        ("ValueError: no free memory", False, 3, ""),
        ("ValueError: no such quantisation", True, 3, ""),  # it could be served, so it can be
    ],
)
def test_an_engine_that_never_can_is_not_started_again(
    tmp_path: Path, says: str, serves: bool, starts: int, refusal: str
) -> None:
    engine = supervisor(tmp_path, tmp_path / "far-engine.log", f"echo '{says}' >&2; exit 1", 2)
    if serves:
        engine.engine_serves()
    asyncio.run(engine.run())
    assert (engine.restarts + 1, engine.refusal, engine.gave_up) == (starts, refusal, True)


def test_an_engine_that_starts_anew_with_others_counts_their_death_and_is_given_up_with_them(tmp_path: Path) -> None:
    """Else a group of several would be started again as many times as often as an engine on its own. Its own end alone is
    told to the others."""

    async def scenario() -> None:
        engine, told = supervisor(tmp_path, tmp_path / "far-engine.log", "exec sleep 600", 3), list[str]()
        engine.on_death = lambda: told.append("ended")
        running = asyncio.create_task(engine.run())
        async with asyncio.timeout(60.0):
            for start in range(4):
                while engine.pid is None or engine.restarts < start:  # noqa: ASYNC110 a process starts
                    await asyncio.sleep(0.01)
                if start == 2:
                    engine.kill()  # which is a death of the group as well
                else:
                    engine.start_anew(False)
                    engine.start_anew(False)
            await running
        assert (told, engine.gave_up, engine.restarts) == (["ended"], True, 3)

    asyncio.run(scenario())


def test_an_engine_that_is_told_late_of_a_death_that_it_has_counted_counts_no_other(tmp_path: Path) -> None:
    """Its last one has ended of it, too. This one cannot go on with those that start anew."""

    async def scenario() -> None:
        engine = supervisor(tmp_path, tmp_path / "far-engine.log", "exec sleep 600", 0)
        running = asyncio.create_task(engine.run())
        async with asyncio.timeout(60.0):
            for start in range(3):
                while engine.pid is None or engine.restarts < start:  # noqa: ASYNC110 a process starts
                    await asyncio.sleep(0.01)
                if start < 2:
                    engine.start_anew(True)
            assert not engine.gave_up
            engine.start_anew(False)
            await running
        assert (engine.gave_up, engine.restarts) == (True, 2)

    asyncio.run(scenario())

"""An engine whose queue is full has done nothing: another one is asked, and not for ever."""

import pytest

from tests.gateway.memory.pipeline import on_memory_loop, pipeline

LONG = "the quick brown fox jumps over the lazy dog " * 40
SHORT = "hello there"


@on_memory_loop
async def test_a_full_engine_is_passed_over_and_spends_no_retry() -> None:
    async with pipeline(retry_share=0.0, least_retries=0) as w:
        for node in w.nodes.decode:
            node.script.decode = ["503 queue_full"]
        w.nodes.decode[1].script.decode = []
        for _ in range(3):
            w.nodes.decode[0].script.decode = ["503 queue_full"]
            assert (await w.complete(SHORT)).status == 200
        assert set(await w.fallbacks()) <= {"decode_queue_full"}


@on_memory_loop
async def test_full_engines_are_not_asked_for_ever_however_patient_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.routing.router.Router.may_compute", lambda *_: False)  # every decode node is spared
    async with pipeline(decode=2, max_attempts=3) as w:
        full, crowded = w.nodes.decode
        full.script.decode = ["503 queue_full"] * 1000
        crowded.script.room = 0
        answer = await w.complete(LONG)
        assert (answer.status, (await answer.json())["error"]["code"]) == (429, "no_room")
        assert (await w.fallbacks())["decode_queue_full"] <= 4

"""Models join and leave a running gateway: by its file, and by their nodes."""

import asyncio
from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from gateway.config.gateway import GatewayConfig
from gateway.config.models import MOST_MODELS, ModelTable
from gateway.models.upkeep import AGAIN_S, SeenModels
from prompts.errors import TokenizerUnreadable
from prompts.tokens.tokenizer import TextTokenizer
from tests.gateway.members.test_roster import without
from tests.gateway.memory.pipeline import on_memory_loop, pipeline
from tests.gateway.models.worlds import OTHER, TABLE, ask, bring, error_of, tokenizers, two_models
from tests.gateway.worlds import until

NAMES = st.sets(st.sampled_from([f"m{number}" for number in range(2 * MOST_MODELS)]))
GRACE_S = 30.0


@on_memory_loop
async def test_a_model_that_nodes_bring_is_served_with_its_folder_and_forgotten_after_they_have_gone(
    tmp_path: Path,
) -> None:
    (tmp_path / OTHER).mkdir()
    async with pipeline(
        remote=0, local=1, decode=2, tokenizers=tokenizers, models_dir=tmp_path, model_grace_s=GRACE_S
    ) as w:
        second = w.nodes.decode[1]
        assert (await error_of(w, OTHER))["status"] == 404
        bring(second)
        await until(lambda: w.models.serves(OTHER) and OTHER in w.models)
        assert (await ask(w, OTHER), await ask(w, "scripted")) == (200, 200)
        assert [each["model"] for each in await w.records()] == [OTHER, "scripted"]
        whole = w.config
        without(w, second)
        await until(lambda: len(w.clusters.nodes) == 2)
        assert (await error_of(w, OTHER))["code"] == "no_decode_node"
        assert await ask(w, "scripted") == 200
        await asyncio.sleep(GRACE_S + 2)
        assert OTHER not in w.models
        assert (await error_of(w, OTHER))["status"] == 404
        assert [card["id"] for card in (await (await w.http.get("/v1/models")).json())["data"]] == ["scripted"]
        w.configure(whole)
        await until(lambda: OTHER in w.models and w.models.serves(OTHER))
        assert await ask(w, OTHER) == 200


@on_memory_loop
async def test_a_model_that_nodes_bring_without_a_folder_of_its_own_is_not_served(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    async with pipeline(
        remote=0, local=1, decode=2, tokenizers=tokenizers, tokenizer_dir=tmp_path / "own", models_dir=tmp_path
    ) as w:
        for name in ("own", "../own", "missing", ""):
            bring(w.nodes.decode[1], name)
            await asyncio.sleep(2)
            assert [parts.key for parts in w.models] == [""], name
            assert await ask(w, "scripted") == 200


@on_memory_loop
async def test_a_table_more_or_less_is_taken_over_while_requests_run() -> None:
    async with pipeline(remote=0, local=1, decode=2, tokenizers=tokenizers) as w:
        second = w.nodes.decode[1]
        bring(second)
        await until(lambda: w.clusters.nodes[-1].info and w.clusters.nodes[-1].info.model_id == OTHER)
        assert (await error_of(w, OTHER))["status"] == 404
        w.configure(replace(w.config, models=(TABLE,)))
        await until(lambda: OTHER in w.models)
        assert await ask(w, OTHER) == 200

        second.script.decode_gate = asyncio.Event()
        under_way = asyncio.create_task(ask(w, OTHER, "is under way"))
        await until(lambda: second.running)
        w.configure(replace(w.config, models=()))
        await until(lambda: OTHER not in w.models)
        assert (await error_of(w, OTHER))["status"] == 404
        second.script.decode_gate.set()
        assert await under_way == 200
        assert await ask(w, "scripted") == 200


@on_memory_loop
async def test_a_threshold_of_a_table_is_taken_over() -> None:
    async with two_models() as w:
        w.configure(replace(w.config, models=(replace(TABLE, threshold_tokens=7.0),)))
        assert {parts.key: parts.router.setting.threshold_tokens for parts in w.models} == {"": 100, OTHER: 7.0}


@on_memory_loop
async def test_a_model_whose_tokenizer_cannot_be_read_leaves_others_alone_and_is_tried_again() -> None:
    is_broken = True

    def read(config: GatewayConfig) -> TextTokenizer:
        if config.served_model == OTHER and is_broken:
            raise TokenizerUnreadable("it is half written")
        return tokenizers(config)

    async with pipeline(remote=0, local=1, decode=2, tokenizers=read, models=(TABLE,)) as w:
        bring(w.nodes.decode[1])
        await until(lambda: w.models.serves(OTHER))
        assert (await error_of(w, OTHER))["code"] == "no_model"
        assert await ask(w, "scripted") == 200
        assert (await w.fallbacks())["model_unreadable"] >= 1
        is_broken = False
        await asyncio.sleep(AGAIN_S + 2)
        assert await ask(w, OTHER) == 200


@on_memory_loop
async def test_the_default_model_stays_as_long_as_its_gateway() -> None:
    table = ModelTable(name="scripted", tokenizer_dir=Path("unused"))
    async with pipeline(
        decode=1, tokenizers=tokenizers, tokenizer_dir=None, served_model="", models=(table, TABLE)
    ) as w:
        assert w.reloads.take(replace(w.config, models=(TABLE,))) == ["models"]
        assert await ask(w, "scripted") == 200


@given(st.lists(st.tuples(NAMES, st.floats(0, 100)), max_size=12), st.floats(0, 200))
def test_so_many_are_known_at_most_and_none_for_longer_than_its_grace(
    looks: list[tuple[set[str], float]], grace_s: float
) -> None:
    now, seen = 0.0, SeenModels()
    for here, pause_s in looks:
        now += pause_s
        before, seen = seen, seen.at(now, here, grace_s)
        assert len(seen.last_seen_s) <= 2 * MOST_MODELS
        for name, at in seen.last_seen_s.items():
            assert at == now if name in here else now - at < grace_s
        assert here & before.last_seen_s.keys() <= seen.last_seen_s.keys() | {
            name for name, at in before.last_seen_s.items() if now - at >= grace_s
        }


def test_a_model_that_is_here_pushes_out_none_that_was() -> None:
    full = SeenModels().at(0.0, {f"a{number}" for number in range(MOST_MODELS)}, 10.0)
    later = full.at(1.0, {"b", "a1"}, 10.0)
    assert later.last_seen_s.keys() == full.last_seen_s.keys()
    assert later.last_seen_s["a1"] == 1.0
    assert "b" in later.at(11.5, {"b"}, 10.0).last_seen_s

"""Models join and leave a running gateway: by its file, and by their nodes."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from gateway.config.gateway import GatewayConfig, NodeAddress
from gateway.config.models import MOST_MODELS, REST, ModelCatalog, ModelTable
from gateway.models.upkeep import AGAIN_S, SeenModels, brought
from prompts.errors import TokenizerUnreadable
from prompts.tokens.tokenizer import TextTokenizer
from tests.gateway.layouts import LAYOUT
from tests.gateway.members.test_roster import without
from tests.gateway.memory.pipeline import on_memory_loop, pipeline
from tests.gateway.models.worlds import LONG, OTHER, TABLE, ask, bring, error_of, tokenizers, two_models
from tests.gateway.worlds import PATIENCE_S, until
from tests.prompts.builders import text_tokenizer

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
        await until(lambda: OTHER not in w.models)
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
async def test_a_node_that_brings_a_model_is_never_used_for_another_one_whose_nodes_are_gone(tmp_path: Path) -> None:
    (tmp_path / OTHER).mkdir()
    async with pipeline(remote=0, local=0, decode=1, tokenizers=tokenizers, models_dir=tmp_path) as w:
        node = w.nodes.decode[0]
        assert await ask(w, "scripted") == 200
        bring(node)
        while OTHER not in w.models:
            assert await ask(w, "scripted") == 503 or not node.bodies[1:]
            await asyncio.sleep(0.01)
        assert (await ask(w, OTHER), await ask(w, "scripted")) == (200, 503)
        bring(node, "scripted", LAYOUT)
        await until(lambda: w.models.serves(""))
        assert (await ask(w, OTHER), await ask(w, "scripted")) == (503, 200)
        assert [body["model"] for body in node.bodies] == ["scripted", OTHER, "scripted"]


@on_memory_loop
async def test_a_table_that_has_another_tokenizer_has_its_model_read_by_that_one() -> None:
    new, is_broken = Path("new"), True

    def read(config: GatewayConfig) -> TextTokenizer:
        if config.tokenizer_dir == new and is_broken:
            raise TokenizerUnreadable("it is half written")
        return text_tokenizer() if config.tokenizer_dir == new else tokenizers(config)

    async with pipeline(remote=0, local=1, decode=2, tokenizers=read, models=(TABLE,)) as w:
        bring(w.nodes.decode[1])
        await until(lambda: w.models.serves(OTHER))

        async def is_by_bytes() -> bool:
            async with w.http.post("/tokenize", json={"model": OTHER, "prompt": LONG}) as answer:
                return bool((await answer.json())["count"] == len(LONG))

        assert await is_by_bytes()
        w.configure(replace(w.config, models=(replace(TABLE, tokenizer_dir=new, threshold_tokens=7.0),)))
        await until(lambda: w.models.named(OTHER).router.setting.threshold_tokens == 7)
        await asyncio.sleep(2)
        assert await is_by_bytes()  # the one before serves until the new one can
        is_broken = False
        while await is_by_bytes():  # noqa: ASYNC110 nothing tells
            await asyncio.sleep(AGAIN_S)
        assert await ask(w, OTHER) == 200


@on_memory_loop
async def test_a_reload_while_a_tokenizer_is_read_counts() -> None:
    is_asked, may_go_on = threading.Event(), threading.Event()

    def read(config: GatewayConfig) -> TextTokenizer:
        if config.served_model == OTHER:
            is_asked.set()
            assert may_go_on.wait(PATIENCE_S)
        return tokenizers(config)

    late = ModelTable(name="late", tokenizer_dir=TABLE.tokenizer_dir)
    async with pipeline(remote=0, local=1, decode=2, tokenizers=read) as w:
        w.configure(replace(w.config, models=(TABLE, late)))
        await until(is_asked.is_set)
        w.configure(replace(w.config, models=(replace(TABLE, threshold_tokens=7.0),)))
        may_go_on.set()
        await until(lambda: OTHER in w.models)
        assert w.models.named(OTHER).router.setting.threshold_tokens == 7
        await asyncio.sleep(2)
        assert "late" not in w.models
        assert 'work="models"' not in await w.metrics()


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
        await until(lambda: OTHER in w.models)
        assert await ask(w, OTHER) == 200


@on_memory_loop
async def test_the_default_model_stays_as_long_as_its_gateway() -> None:
    table = ModelTable(name="scripted", tokenizer_dir=Path("unused"))
    async with pipeline(
        decode=1, tokenizers=tokenizers, tokenizer_dir=None, served_model="", models=(table, TABLE)
    ) as w:
        for models in ((TABLE,), (replace(table, tokenizer_dir=Path("new")), TABLE)):
            assert w.reloads.take(replace(w.config, models=models)) == ["models"]
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
    tables = tuple(ModelTable(name=f"t{number}") for number in range(MOST_MODELS - 1))
    two = SeenModels().at(0.0, {"b"}, 10.0).at(1.0, {"a", "b"}, 10.0)
    assert ModelCatalog(tables).with_found(two.last_seen_s).models[-1].name == "b"


def test_a_folder_has_no_name_that_the_file_gives_a_model(tmp_path: Path) -> None:
    for name in ("chat", "sibling", "new"):
        (tmp_path / name).mkdir()
    node = NodeAddress(agent="127.0.0.1:1")
    config = GatewayConfig(
        tokenizer_dir=Path("t"), served_model="chat", models=(TABLE,), models_dir=tmp_path, nodes=(node,)
    )
    assert brought(config, {"chat", "sibling", OTHER, "new"}) == {"new"}
    assert [config.catalog.of_node(name) for name in ("chat", OTHER, "new")] == [REST, OTHER, None]

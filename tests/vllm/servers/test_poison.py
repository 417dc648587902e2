"""A request that kills real vLLM engines: two of three servers at most, and others are answered meanwhile.

Engines of all releases have died of some request or other, of none for long. Here a plugin of vLLM's, which its servers find by
their path, has EngineCore die of prompts with a mark in them.
"""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Bench
from tests.vllm.cases import build
from tests.vllm.servers.serving import CHUNK
from tests.vllm.servers.test_serving import ARCH

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800), pytest.mark.dimensions(start="poison")]

NODES = ("decode0", "decode1", "decode2")
BACK_S = 600.0
MARK = (500, 501, 500)  # followed by how the engine dies
KILLED, RAISES = 502, 503
PLUGIN = f"""
import os, signal

def register():
    from vllm.v1.engine.core import EngineCore
    add_request = EngineCore.add_request

    def add(self, request, *args, **kwargs):
        tokens = tuple(request.prompt_token_ids or ())
        for index in range(len(tokens) - 3):
            if tokens[index : index + 3] == {MARK}:
                if tokens[index + 3] == {KILLED}:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError("an engine's own fault")
        return add_request(self, request, *args, **kwargs)

    EngineCore.add_request = add
"""


def install_plugin(folder: Path) -> None:
    """As pip would lay it out."""
    (folder / "poisonable.py").write_text(PLUGIN)
    about = folder / "poisonable-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: poisonable\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\npoisonable = poisonable:register\n")


def document(model: str) -> dict[str, Any]:
    return {
        "model": {"path": model, "name": "tiny"},
        "gateway": {"port": 0},
        "node": {
            "engine": "vllm",
            "engine_args": ["--dtype", "float32", "--num-gpu-blocks-override", "256"],
            "chunk_tokens": CHUNK,
            "max_model_len": 2048,
            "cache_bytes": 32 << 20,
        },
        "clusters": [
            {"name": "west", "kind": "pd", "nodes": [{"node_id": name, "role": "decode"} for name in NODES]},
        ],
    }


@pytest.fixture(scope="module")
def bench(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    plugin, usual = tmp_path_factory.mktemp("plugin"), os.environ.get("PYTHONPATH", "")
    install_plugin(plugin)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(plugin), usual]))
    try:
        model = build(ARCH, models)
        with Bench(document(str(model)), model, tmp_path_factory.mktemp("poison")) as running:
            yield running
    finally:
        os.environ["PYTHONPATH"] = usual


async def ask(bench: Bench, prompt: list[int], name: str, **options: Any) -> tuple[int, dict[str, Any]]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True} | options
    url, headers = f"{bench.system.api_url}/v1/completions", {"x-request-id": name}
    async with bench.session.post(url, json=body, headers=headers) as answer:
        return answer.status, await answer.json()


@pytest.mark.parametrize(
    ("way", "options"), [(KILLED, {"top_k": 5}), (RAISES, {"min_p": 0.1})], ids=["killed", "raises"]
)
def test_a_request_takes_two_engines_with_it_and_no_more(bench: Bench, way: int, options: dict[str, Any]) -> None:
    async def scenario() -> None:
        async def all_are_ready() -> bool:
            return [await bench.gateway_sees(node) for node in NODES] == ["ready"] * len(NODES)

        async def refused() -> float:
            return await bench.metric(bench.system.api_url, 'prfaas_engine_killers_total{outcome="refused"}')

        async def restarts() -> float:
            urls = [bench.node(node).metrics_url for node in NODES]
            return sum([await bench.metric(url, "prfaas_engine_restarts_total") for url in urls])

        await bench.wait_until(all_are_ready, BACK_S)
        others, before, deaths = (
            [bench.prompt(300, seed=way + seed) for seed in range(3)],
            await refused(),
            await restarts(),
        )
        expected = [(await bench.generate(prompt)).token_ids for prompt in others]

        poison, name = [*bench.prompt(60, seed=way), *MARK, way, *bench.prompt(9, seed=9)], bench.name()
        (status, told), *_ = await asyncio.gather(ask(bench, poison, name, **options), bench.generate(others[0]))
        assert (status, told["error"]["code"]) == (500, "kills_engines")
        record = await bench.record(name)
        assert record["fallbacks"] == ["decode_engine_died"] * 2
        assert await refused() == before + 1

        # Another of its kind, and harmless: no other engine dies to find that out.
        name = bench.name()
        status, told = await ask(bench, bench.prompt(70, seed=3), name, **options)
        assert (status, told["error"]["code"]) == (503, "shape_kills_engines")
        # Of another kind: the engine that is left answers, and then all of them.
        for prompt, tokens in zip(others, expected, strict=True):
            assert (await bench.generate(prompt)).token_ids == tokens
        await bench.wait_until(all_are_ready, BACK_S)
        assert await restarts() == deaths + 2
        done = await asyncio.gather(*(bench.generate(prompt) for prompt in others * 2))
        assert [each.token_ids for each in done] == expected * 2

    bench.run(scenario(), 3 * BACK_S)
    bench.run(bench.wait_idle())

"""A LoRA adapter of the model served: asked for through the gateway it is vLLM's, and its KVCache is shared with no other.

What one server alone would answer comes from the decode node's, asked directly under a salt of its own.
"""

import json
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from prfaas.demo.client import complete
from tests.e2e.harness import Bench
from tests.vllm.cases import build

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200), pytest.mark.dimensions(start="adapters")]

ARCH = "llama"
NAME = "terse"
RANK = 8


def write_adapter(model: Path, path: Path) -> None:
    """An adapter of random weights, large enough to say something else than its model."""
    config = json.loads((model / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    outs = {"q_proj": heads * size, "v_proj": config.get("num_key_value_heads", heads) * size}
    draw = np.random.default_rng(5)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for module, out in outs.items():
            where = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{where}.lora_A.weight"] = draw.normal(0, 1, (RANK, hidden)).astype(np.float32)
            weights[f"{where}.lora_B.weight"] = draw.normal(0, 1, (out, RANK)).astype(np.float32)
    path.mkdir()
    save_file(weights, path / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    (path / "adapter_config.json").write_text(
        json.dumps(about | {"target_modules": sorted(outs), "base_model_name_or_path": str(model)})
    )


@pytest.fixture(scope="module")
def bench(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("adapters")
    model, adapter = build(ARCH, models), folder / NAME
    write_adapter(model, adapter)
    flags = ["--dtype", "float32", "--num-gpu-blocks-override", "512", "--enable-lora", "--max-lora-rank", str(RANK)]
    document = {
        "model": {"path": str(model), "name": "tiny"},
        "gateway": {"port": 0, "threshold_tokens": 300},
        "node": {
            "engine": "vllm",
            "engine_args": [*flags, "--lora-modules", f"{NAME}={adapter}"],
            "chunk_tokens": 256,
            "max_model_len": 2048,
            "cache_bytes": 64 << 20,
        },
        "clusters": [
            {"name": "east", "kind": "prfaas", "nodes": [{"node_id": "far", "role": "prefill", "transport": "tcp"}]},
            {"name": "west", "kind": "pd", "nodes": [{"node_id": "decode0", "role": "decode"}]},
        ],
    }
    with Bench(document, model, folder) as running:
        yield running


async def alone(bench: Bench, model: str, prompt: Sequence[int]) -> list[int]:
    """What one vLLM server gives for a prompt that nothing is cached of."""
    body = {"model": model, "prompt": list(prompt), "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    done = await complete(
        bench.session, bench.node("decode0").engine_url, body | {"cache_salt": uuid.uuid4().hex}, bench.name()
    )
    return done.token_ids


def test_an_adapter_and_its_model_never_share(bench: Bench) -> None:
    async def scenario() -> None:
        async with bench.session.get(f"{bench.system.api_url}/v1/models") as answer:
            cards = {card["id"]: card.get("parent") for card in (await answer.json())["data"]}
        assert cards == {"tiny": None, NAME: "tiny"}
        prompt = bench.prompt(900, seed=3)
        expected = {model: await alone(bench, model, prompt) for model in ("tiny", NAME)}
        assert expected["tiny"] != expected[NAME]
        seen = []
        for model in (NAME, "tiny", NAME, "tiny"):
            name = bench.name()
            done = await bench.generate(prompt, name=name, model=model)
            assert done.token_ids == expected[model], model
            record = await bench.record(name)
            assert record["fallbacks"] == []
            seen.append((model, record["route"], record["reason"] == "unshared", record["cached"] > 0))
        assert seen == [
            (NAME, "local", True, False),
            ("tiny", "remote", False, False),  # what the adapter has left is of no use to its model
            (NAME, "local", True, False),
            ("tiny", seen[3][1], False, True),
        ]
        await bench.wait_idle()

    bench.run(scenario())

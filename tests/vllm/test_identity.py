"""The name of a server's KVCache, from vLLM's own configurations: what changes bytes changes it, what does not does not."""

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.cases import build

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # what vLLM's import warns of is not ours to mend
]


@pytest.fixture(scope="module")
def model(models: Path) -> Path:
    return build("llama", models)


def config(model: Path, **flags: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    arguments: dict[str, Any] = {"model": str(model), "dtype": "float32", "max_model_len": 2048} | flags
    return EngineArgs(**arguments).create_engine_config()


def name_of(config: Any) -> str:
    from engine.vllm.identity import kv_identity
    from engine.vllm.internals import kv_facts, model_source

    return kv_identity(*model_source(config), kv_facts(config))


def name(model: Path, **flags: Any) -> str:
    return name_of(config(model, **flags))


@pytest.mark.parametrize(
    "flags",
    [
        {"dtype": "bfloat16"},
        {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 77_777.0}}},
        {"hf_overrides": {"rms_norm_eps": 0.01}},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype_skip_layers": ["0"]},
        {"mamba_cache_dtype": "float32"},
        {"enable_lora": True},
        {"enable_lora": True, "max_lora_rank": 64},
        {"load_format": "dummy"},
        {"load_format": "dummy", "seed": 3},
        {"code_revision": "abc"},
    ],
    ids=str,
)
def test_flags_that_change_kvcache_are_another_name(model: Path, flags: dict[str, Any]) -> None:
    assert name(model, **flags) != name(model)


def test_states_of_another_dtype_are_another_name_unless_the_platform_overrules_it(model: Path) -> None:
    """On CPUs with AVX-512 BF16 vLLM stores states as float32, whatever it was asked for."""
    asked, plain = config(model, mamba_ssm_cache_dtype="float32"), config(model)
    is_overruled = asked.cache_config.mamba_ssm_cache_dtype == plain.cache_config.mamba_ssm_cache_dtype
    assert (name_of(asked) == name_of(plain)) == is_overruled


def test_flags_that_differ_among_themselves_are_different_names(model: Path) -> None:
    ranks = [name(model, enable_lora=True, max_lora_rank=rank) for rank in (8, 16)]
    seeds = [name(model, load_format="dummy", seed=seed) for seed in (1, 2)]
    assert len({*ranks, *seeds}) == 4


@pytest.mark.parametrize(
    "flags",
    [
        {"max_model_len": 1024},
        {"gpu_memory_utilization": 0.5},
        {"max_num_batched_tokens": 256},
        {"enforce_eager": True},
        {"enable_prefix_caching": False},
        {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
        {"served_model_name": "other"},
        {"seed": 3},
    ],
    ids=str,
)
def test_flags_that_do_not_leave_it_alone(model: Path, flags: dict[str, Any]) -> None:
    assert name(model, **flags) == name(model)


def test_weights_that_are_quantised_while_they_are_loaded_are_another_name(model: Path) -> None:
    assert name(model, dtype="bfloat16", quantization="fp8") != name(model, dtype="bfloat16")


def test_what_is_left_out_of_a_name_is_still_called_so() -> None:
    import dataclasses

    from vllm.config import VllmConfig

    from engine.vllm.server.harmless import HARMLESS

    types = {field.name: field.type for field in dataclasses.fields(VllmConfig)}
    import vllm.config as configs

    for part, harmless in HARMLESS.items():
        kind = getattr(configs, str(types[part]).replace(" | None", "").split(".")[-1].strip("<>' "))
        assert harmless <= {field.name for field in dataclasses.fields(kind)}, part

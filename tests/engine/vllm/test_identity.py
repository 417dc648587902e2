"""Two vLLM servers whose KVCache differs never have one name; two that are only run differently have."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.vllm.identity import kv_identity
from engine.vllm.internals import kv_facts, model_source
from hybrid_cache.errors import LayoutError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Pretrained:
    """A configuration of transformers."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def __repr__(self) -> str:
        return f"Pretrained({self.__dict__})"

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


@dataclass(frozen=True)
class Model:
    model: str
    model_weights: str = ""
    revision: str | None = None
    dtype: str = "torch.bfloat16"
    quantization: str | None = None
    hf_config: Pretrained = field(
        default_factory=lambda: Pretrained(model_type="llama", rope_parameters={"rope_theta": 1e4})
    )
    hf_overrides: Any = field(default_factory=dict)
    disable_sliding_window: bool = False
    seed: int = 0
    max_model_len: int = 4096
    served_model_name: str = "tiny"
    enforce_eager: bool = False


@dataclass(frozen=True)
class Cache:
    cache_dtype: str = "auto"
    kv_cache_dtype_skip_layers: tuple[str, ...] = ()
    gpu_memory_utilization: float = 0.9
    num_gpu_blocks: int | None = None


@dataclass(frozen=True)
class Load:
    load_format: str = "auto"
    download_dir: str | None = None


@dataclass(frozen=True)
class Lora:
    max_lora_rank: int = 16
    default_mm_loras: dict[str, str] | None = None
    max_loras: int = 1


@dataclass(frozen=True)
class Empty:
    """A part without any setting."""


def config(model: Model, **parts: Any) -> SimpleNamespace:
    values = {
        "model_config": model,
        "cache_config": Cache(),
        "load_config": Load(),
        "attention_config": Empty(),
        "mamba_config": Empty(),
        "lora_config": None,
        "additional_config": {},
    }
    return SimpleNamespace(**(values | parts))


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(str(directory(tmp_path / "model", b"weights")))


def directory(path: Path, weights: bytes) -> Path:
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "model.safetensors").write_bytes(weights)
    return path


def name(vllm_config: Any, revision: str = "") -> str:
    return kv_identity(*model_source(vllm_config), kv_facts(vllm_config), revision=revision)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "torch.float16"},
        {"quantization": "fp8"},
        {"hf_overrides": {"rope_parameters": {"rope_theta": 5e5}}},
        {"hf_config": Pretrained(model_type="llama", rope_parameters={"rope_theta": 5e5})},
        {
            "hf_config": Pretrained(
                model_type="llama", rope_parameters={"rope_theta": 1e4}, quantization_config={"bits": 4}
            )
        },
        {"disable_sliding_window": True},
    ],
    ids=str,
)
def test_a_model_that_is_loaded_otherwise_has_another_name(model: Model, change: dict[str, Any]) -> None:
    assert name(config(replace(model, **change))) != name(config(model))


@pytest.mark.parametrize(
    "parts",
    [
        {"cache_config": Cache(cache_dtype="fp8")},
        {"cache_config": Cache(kv_cache_dtype_skip_layers=("0",))},
        {"lora_config": Lora()},
        {"lora_config": Lora(default_mm_loras={"audio": "adapters/a"})},
        {"load_config": Load(load_format="dummy")},
        {"additional_config": {"platform": {"x": 1}}},
    ],
    ids=str,
)
def test_a_server_with_other_flags_has_another_name(model: Model, parts: dict[str, Any]) -> None:
    assert name(config(model, **parts)) != name(config(model))


def test_adapters_that_differ_are_told_apart(model: Model) -> None:
    one, other = ({"lora_config": Lora(default_mm_loras={"audio": f"adapters/{letter}"})} for letter in "ab")
    assert name(config(model, **one)) != name(config(model, **other))


def test_dummy_weights_are_those_of_their_seed(model: Model) -> None:
    dummy = {"load_config": Load(load_format="dummy")}
    assert name(config(replace(model, seed=1), **dummy)) != name(config(model, **dummy))


def test_a_flag_that_is_new_to_us_counts(model: Model) -> None:
    @dataclass(frozen=True)
    class NewerCache(Cache):
        rotate_keys_differently: bool = False

    default, flipped = NewerCache(), NewerCache(rotate_keys_differently=True)
    assert name(config(model, cache_config=default)) != name(config(model, cache_config=flipped))


@pytest.mark.parametrize(
    "change",
    [
        {"max_model_len": 2048},
        {"served_model_name": "other"},
        {"enforce_eager": True},
        {"seed": 5},
        {"revision": "main"},
    ],
    ids=str,
)
def test_how_a_server_is_run_does_not_change_its_name(model: Model, change: dict[str, Any]) -> None:
    assert name(config(replace(model, **change))) == name(config(model))
    cache = Cache(gpu_memory_utilization=0.5, num_gpu_blocks=77)
    assert name(config(model, cache_config=cache, load_config=Load(download_dir="/x"))) == name(config(model))


def test_the_length_that_chooses_factors_of_long_rope_counts(model: Model) -> None:
    """Phi-3: the same model with a limit beyond its original length rotates by other factors from the first token on."""
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    scaled = replace(model, hf_config=Pretrained(model_type="phi3", rope_parameters=rope))
    lengths = {length: name(config(replace(scaled, max_model_len=length))) for length in (2048, 4096, 8192)}
    assert lengths[2048] == lengths[4096] != lengths[8192]


def test_one_byte_of_weights_is_another_name_and_a_copy_is_the_same(tmp_path: Path) -> None:
    paths = [
        directory(tmp_path / str(number), weights)
        for number, weights in enumerate((b"weights", b"weighty", b"weights"))
    ]
    names = [name(config(Model(str(path)))) for path in paths]
    assert names[0] != names[1]
    assert names[0] == names[2]


def test_a_directory_does_not_show_in_the_name(tmp_path: Path) -> None:
    where = [
        Model(str(directory(tmp_path / side, b"w")), hf_config=Pretrained(model_type="llama", _name_or_path=side))
        for side in ("here", "there")
    ]
    assert name(config(where[0])) == name(config(where[1]))


def test_a_single_file_is_named_by_its_bytes(tmp_path: Path) -> None:
    names = []
    for weights in (b"weights", b"weighty"):
        path = tmp_path / "model.gguf"
        path.write_bytes(weights)
        names.append(name(config(Model(str(path)))))
    assert names[0] != names[1]


def test_a_downloaded_model_is_named_by_its_commit() -> None:
    named = Model("org/model", hf_config=Pretrained(_commit_hash=COMMIT))
    other = replace(named, hf_config=Pretrained(_commit_hash=COMMIT[::-1]))
    assert name(config(named)) != name(config(other))
    assert name(config(named)) == name(config(replace(named, revision=COMMIT)))
    assert name(config(named)) != name(config(replace(named, model="org/other")))


@pytest.mark.parametrize("revision", [None, "main", "v1"])
def test_a_name_whose_weights_may_change_is_refused(revision: str | None) -> None:
    with pytest.raises(LayoutError, match="cannot tell"):
        name(config(Model("org/model", revision=revision)))


def test_weights_elsewhere_need_the_operators_word(model: Model) -> None:
    elsewhere = config(replace(model, model_weights="s3://bucket/model"))
    with pytest.raises(LayoutError, match="cannot tell"):
        name(elsewhere)
    assert name(elsewhere, revision="r1") != name(elsewhere, revision="r2")

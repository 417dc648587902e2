"""What layers keep, of published configurations, of the repository's own models, and of files that cannot be read."""

from pathlib import Path

import pytest

from engine.emulated.emulated import GROUPS
from engine.torch.tiny import RECIPES, recipe_of
from planner.model.profile import load_profile
from planner.profiles.config import ModelConfig
from planner.profiles.families import model_layers
from planner.profiles.mixers import ElementBytes
from planner.profiles.sizes import described, kv_size_of, layout_of_layers
from planner.profiles.weights import WeightCounts, kv_dtype, weight_bytes
from tests.planner.profiles import models
from transport.control.settings import SettingsError

PROFILES = Path("configs/profiles").resolve()
MIXED = ElementBytes(kv=2, state=4, convolution=2)  # as engines keep them: states in float32


def layout_of(table, element=MIXED):
    config = ModelConfig.of(table)
    return layout_of_layers(config.model_type, "bfloat16", model_layers(config), element)


def kv_of(table, element=MIXED):
    return kv_size_of(layout_of(table, element), "derived: test", 0.0)


@pytest.mark.parametrize(
    ("table", "per_token", "fixed", "windows"),
    [
        (models.LLAMA3_70B, 80 * 8 * 128 * 2 * 2, 0, {}),
        (models.QWEN3_235B, 94 * 4 * 128 * 2 * 2, 0, {}),
        (models.DEEPSEEK_V3, 61 * (512 + 64) * 2, 0, {}),
        (models.MINIMAX_M2, 62 * 8 * 128 * 2 * 2, 0, {}),
        (models.GPT_OSS_120B, 18 * 8 * 64 * 2 * 2, 0, {128: 18 * 8 * 64 * 2 * 2}),
        (models.GEMMA3_27B, 10 * 16 * 128 * 2 * 2, 0, {1024: 52 * 16 * 128 * 2 * 2}),
        (models.MIMO_V2_FLASH, 9 * 4 * (192 + 128) * 2, 0, {128: 39 * 8 * (192 + 128) * 2}),
        (models.QWEN3_NEXT_80B, 12 * 2 * 256 * 2 * 2, 36 * (32 * 128 * 128 * 4 + 8192 * 3 * 2), {}),
        (models.QWEN35_397B, 15 * 2 * 256 * 2 * 2, 45 * (64 * 128 * 128 * 4 + 12288 * 3 * 2), {}),
        (models.KIMI_LINEAR_48B, 7 * 576 * 2, 20 * (32 * 128 * 128 * 4 + 3 * 4096 * 3 * 2), {}),
        (models.NEMOTRON_H_8B, 4 * 8 * 128 * 2 * 2, 24 * (8192 * 128 * 4 + (8192 + 2 * 8 * 128) * 3 * 2), {}),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else None,
)
def test_sizes_of_published_models(table, per_token, fixed, windows):
    kv = kv_of(table)
    assert (kv.bytes_per_token, kv.fixed_bytes) == (per_token, fixed)
    assert {window.window_tokens: window.bytes_per_token for window in kv.windows} == windows


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("minimax-m2.5", models.MINIMAX_M2),
        ("qwen3-235b", models.QWEN3_235B),
        ("llama3-70b", models.LLAMA3_70B),
        ("mimo-v2-flash", models.MIMO_V2_FLASH),
        ("kimi-linear-48b", models.KIMI_LINEAR_48B),
        ("qwen3.5-397b", models.QWEN35_397B),
    ],
)
def test_sizes_are_those_of_shipped_profiles(name, table):
    """Which leave out the states of convolutions. Kimi Linear's has states of two bytes."""
    shipped = load_profile(PROFILES / f"{name}.json").kv_size()
    state = 2 if name == "kimi-linear-48b" else 4
    kv = kv_of(table, ElementBytes(kv=2, state=state, convolution=0))
    assert [kv(tokens) for tokens in (1, 1000, 100_000)] == [shipped(tokens) for tokens in (1, 1000, 100_000)]


def test_a_model_like_that_of_the_case_study():
    """A hybrid of 60 layers, KDA : MLA = 3 : 1, keeps the paper's 17,280 bytes a token, and about its 173.9 MiB of states."""
    table = models.KIMI_LINEAR_48B | {
        "num_hidden_layers": 60,
        "linear_attn_config": {
            "full_attn_layers": list(range(4, 61, 4)), "head_dim": 128, "num_heads": 64, "short_conv_kernel_size": 4,
        },
    }  # fmt: skip
    kv = kv_of(table)
    assert kv.bytes_per_token == 17_280
    assert kv.fixed_bytes / 2**20 == pytest.approx(173.9, rel=0.1)


@pytest.mark.parametrize("arch", RECIPES)
def test_sizes_are_those_of_the_engines_own_layouts(arch):
    """transformers keeps a column more of a convolution than vLLM and SGLang do."""
    table = recipe_of(arch)
    config = ModelConfig.of(table)
    kernel = table.get("linear_conv_kernel_dim") or table.get("mamba_d_conv") or table.get("conv_L_cache") or 2
    element = ElementBytes(kv=4, state=4, convolution=4 * kernel / (kernel - 1))
    ours = layout_of_layers(arch, "float32", model_layers(config), element)
    assert {(type(group.spec), group.layers): _size(group.spec) for group in ours.groups} == {
        (type(group.spec), group.layers): _size(group.spec) for group in GROUPS[arch]
    }


def _size(spec):
    return getattr(spec, "bytes_per_token", 0) or spec.bytes_per_snapshot


def test_a_layout_and_its_size_agree_at_any_length():
    for table in (models.GPT_OSS_120B, models.KIMI_LINEAR_48B, models.NEMOTRON_H_8B):
        layout = layout_of(table)
        kv = kv_size_of(layout, "derived: test", 0.0)
        assert [kv(tokens) for tokens in (1, 127, 129, 50_000)] == [layout.kv_bytes(n) for n in (1, 127, 129, 50_000)]
    assert described(layout_of(models.GPT_OSS_120B)) == (
        "18 windows of 128 tokens with 2,048 B each, 18 full attention with 2,048 B per token"
    )


@pytest.mark.parametrize(
    ("table", "total_b", "used_b"),
    [  # in 10^9 weights, as transformers counts them for these files; used: without embeddings
        (models.LLAMA3_70B, 70.55, 68.45),
        (models.QWEN3_235B, 235.09, 20.95),
        (models.DEEPSEEK_V3, 671.03, 35.70),
        (models.GPT_OSS_120B, 116.83, 4.55),
        (models.QWEN3_NEXT_80B, 79.67, 3.25),
        (models.MINIMAX_M2, 228.69, 9.80),
        (models.GEMMA3_27B, 27.01, 25.60),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else None,
)
def test_weights_of_published_models(table, total_b, used_b):
    config = ModelConfig.of(table)
    counts = WeightCounts.of(config, model_layers(config))
    assert (counts.total / 1e9, counts.used / 1e9) == (
        pytest.approx(total_b, rel=1e-3),
        pytest.approx(used_b, rel=2e-3),
    )


def weights_of(table, **changes):
    config = ModelConfig.of(table | changes)
    return weight_bytes(config, WeightCounts.of(config, model_layers(config)))


def test_bytes_of_weights_follow_from_the_type_and_the_quantisation():
    assert weights_of(models.LLAMA3_70B).total == pytest.approx(141.1e9, rel=1e-3)
    assert weights_of(models.LLAMA3_70B).error == 0.01
    found = weights_of(models.DEEPSEEK_V3)
    assert (found.total, found.computed) == (pytest.approx(671e9 + 1.85e9, rel=2e-3), 1)
    found = weights_of(models.GPT_OSS_120B)  # its checkpoint has 65.2 GB
    assert (found.total, found.computed) == (pytest.approx(65.2e9, rel=0.05), 4.25 / 8)
    packed = {
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 128}}},
        "quant_method": "compressed-tensors",
    }
    found = weights_of(models.LLAMA3_70B, quantization_config=packed)
    assert found.total == pytest.approx(39.8e9, rel=0.03)
    with pytest.raises(SettingsError, match="quant_method = 'secret': an unknown one; give --weights-gb"):
        weights_of(models.LLAMA3_70B, quantization_config={"quant_method": "secret"})


def test_the_type_of_kvcache_is_said_or_assumed():
    assert kv_dtype(ModelConfig.of(models.LLAMA3_70B)) == ("bfloat16", "torch_dtype")
    scheme = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    assert kv_dtype(ModelConfig.of(models.LLAMA3_70B | {"quantization_config": scheme}))[0] == "fp8"
    dtype, said = kv_dtype(ModelConfig.of(models.LLAMA3_70B | {"torch_dtype": "float32"}))
    assert (dtype, said.startswith("assumed")) == ("bfloat16", True)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({}, "missing: model_type"),
        ({"model_type": "mystery"}, "model_type = 'mystery': an unknown family.*give --family NAME; else --kv-bytes-per-token"),
        ({"model_type": "llama"}, "missing: num_hidden_layers"),
        (models.LLAMA3_70B | {"num_hidden_layers": float("nan")}, "num_hidden_layers = NaN"),
        (models.LLAMA3_70B | {"num_key_value_heads": -8}, "num_key_value_heads = -8"),
        (models.LLAMA3_70B | {"hidden_size": "8192"}, "hidden_size = '8192'"),
        (models.GPT_OSS_120B | {"layer_types": ["full_attention"]}, "layer_types = .*a list of 36, one for each layer"),
        (models.GPT_OSS_120B | {"layer_types": ["odd"] * 36}, r"layer_types\[0\] = 'odd': must be one of"),
        (models.GPT_OSS_120B | {"sliding_window": None}, "missing: sliding_window"),
        (models.LLAMA3_70B | {"layer_types": ["linear_attention"] * 80}, "layer 0 is linear"),
        (models.QWEN3_NEXT_80B | {"full_attention_interval": None}, "missing: layer_types or full_attention_interval"),
        (models.DEEPSEEK_V3 | {"kv_lora_rank": None}, "missing: kv_lora_rank"),
        (models.NEMOTRON_H_8B | {"hybrid_override_pattern": "M-X"}, r"hybrid_override_pattern\[2\] = 'X'"),
        (models.QWEN3_235B | {"num_experts_per_tok": None}, "missing: num_experts_per_tok"),
        (models.QWEN35_397B | {"text_config": [1]}, "text_config = .*must be a table"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(table, said):
    with pytest.raises(SettingsError, match=said):
        weights_of(table)


def test_a_family_can_be_given_by_hand():
    config = ModelConfig.of(models.LLAMA3_70B | {"model_type": "mystery"})
    assert len(model_layers(config, "llama")) == 80
    with pytest.raises(SettingsError, match="--family unheard: must be one of"):
        model_layers(config, "unheard")


LLAMA4_SCOUT = {
    "model_type": "llama4_text", "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192,
    "intermediate_size_mlp": 16384, "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8,
    "head_dim": 128, "num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1,
    "attention_chunk_size": 8192, "no_rope_layers": [],
}  # fmt: skip


def test_what_published_files_leave_out_is_their_familys_default():
    kv = kv_of(LLAMA4_SCOUT)  # every fourth layer has no chunks
    assert (kv.bytes_per_token, kv.windows[0].bytes_per_token) == (12 * 4096, 36 * 4096)
    inner = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
             "sliding_window": 1024}  # fmt: skip
    gemma_4b = {"model_type": "gemma3", "text_config": inner, "torch_dtype": "bfloat16"}
    assert kv_of(gemma_4b).bytes_per_token == 5 * 4 * 256 * 2 * 2
    config = ModelConfig.of(gemma_4b)
    assert WeightCounts.of(config, model_layers(config)).total == pytest.approx(3.88e9, rel=1e-3)
    for name in ("use_sliding_window", "layer_types"):
        assert not kv_of(models.LLAMA3_70B | {"model_type": "qwen2", "sliding_window": 4096, name: None}).windows


def test_mlps_without_a_gate_and_those_that_are_adjusted():
    small = models.LLAMA3_70B | {"hidden_size": 64, "intermediate_size": 1536, "num_hidden_layers": 1}
    dense = {}
    for name, changes in (
        ("llama", {}),
        ("apertus", {}),
        ("lfm2", {"block_auto_adjust_ff_dim": True, "conv_L_cache": 3}),
    ):
        table = small | {"model_type": name, "layer_types": ["conv" if name == "lfm2" else "full_attention"]} | changes
        config = ModelConfig.of(table)
        dense[name] = WeightCounts.of(config, model_layers(config)).dense
    assert dense == {"llama": 3 * 64 * 1536, "apertus": 2 * 64 * 1536, "lfm2": 3 * 64 * 1024}


def test_layers_that_share_kvcache_are_refused():
    with pytest.raises(SettingsError, match="use_cla = True: layers share KVCache"):
        kv_of(models.LLAMA3_70B | {"model_type": "hunyuan_v1_moe", "use_cla": True})
    with pytest.raises(SettingsError, match="an unknown family"):
        kv_of(models.LLAMA3_70B | {"model_type": "step3_text"})  # one group of keys for all heads, under other names


def test_sparse_latents_of_8_bits_have_scales():
    table = models.DEEPSEEK_V3 | {"model_type": "deepseek_v32", "index_head_dim": 128}
    assert kv_of(table).bytes_per_token == 61 * (576 * 2 + 132)
    assert kv_of(table, ElementBytes(kv=1, state=4, convolution=2)).bytes_per_token == 61 * (656 + 132)
    assert kv_of(models.DEEPSEEK_V3, ElementBytes(kv=1, state=4, convolution=2)).bytes_per_token == 61 * 576


def test_attention_is_left_unquantised_where_whole_parts_of_it_are_named():
    def bits16(*names):
        scheme = {"quant_method": "fp8", "modules_to_not_convert": list(names)}
        return weights_of(models.LLAMA3_70B, quantization_config=scheme).total

    all_quantised = bits16()
    attention = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024)
    assert bits16("model.layers.0.linear_attn.conv1d", "lm_head") == all_quantised
    assert bits16("model.layers.*.self_attn") - all_quantised == attention
    assert (
        bits16("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj") - all_quantised == attention / 80
    )
    groups = {"quant_method": "x", "config_groups": {"g": {"weights": None}}}
    with pytest.raises(SettingsError, match="an unknown one"):
        weights_of(models.LLAMA3_70B, quantization_config=groups)
    assert weight_bytes_error(models.LLAMA3_70B | {"vision_config": {"depth": 27}}) == 0.1


def weight_bytes_error(table):
    return weights_of(table).error

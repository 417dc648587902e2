"""What of a KV cache spec is read, what makes equal bytes mean something else, and what is refused."""

import dataclasses
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest

from engine.vllm.layout import LayerKind
from engine.vllm.specs import cache_layer, packing, state_forms
from hybrid_cache.errors import LayoutError

NONE, FP8, NVFP4 = (SimpleNamespace(name=name) for name in ("NONE", "FP8_PER_TENSOR", "NVFP4"))
FIELDS: dict[str, Any] = {
    "block_size": 16,
    "dtype": "torch.bfloat16",
    "kv_quant_mode": NONE,
    "num_head_slots": None,
    "state_content_bytes": None,
    "max_tp_shards": None,
    "tokens_per_state": 1,
    "unpadded_page_size_bytes": 4096,
}
FN, FNUZ = "torch.float8_e4m3fn", "torch.float8_e4m3fnuz"


def spec(kind: str = "FullAttentionSpec", **fields: Any) -> Any:
    """One of vLLM's, with another field where that is asked for. A field's default is 0."""
    values = FIELDS | fields
    # A page's bytes are vLLM's own arithmetic, no field.
    named = [(name, Any, dataclasses.field(default=0)) for name in values if name != "unpadded_page_size_bytes"]
    made = dataclasses.make_dataclass(kind, named, namespace={"unpadded_page_size_bytes": 4096})
    values.pop("unpadded_page_size_bytes")
    return made(**values)


def test_plain_attention_has_nothing_to_say() -> None:
    assert packing(spec(), 4, FN) == ""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (({}, 1, FN), ({"kv_quant_mode": FP8, "dtype": "torch.uint8"}, 1, FN)),
        (({"kv_quant_mode": FP8}, 1, FN), ({"kv_quant_mode": FP8}, 1, FNUZ)),
        (({"kv_quant_mode": FP8}, 1, FN), ({"kv_quant_mode": NVFP4}, 1, FN)),
        (({"cache_dtype_str": "fp8"}, 1, FN), ({"cache_dtype_str": "fp8"}, 1, FNUZ)),
        (({"num_head_slots": 2}, 1, FN), ({}, 1, FN)),
        (({"num_head_slots": 4}, 2, FN), ({"num_head_slots": 8}, 1, FN)),
        (({"num_head_slots": 2}, 2, FN), ({"num_head_slots": 2}, 1, FN)),
        (({"state_content_bytes": 656}, 1, FN), ({"state_content_bytes": 584}, 1, FN)),
        (({"cache_role": SimpleNamespace(value="indexer")}, 1, FN), ({"cache_role": SimpleNamespace(value="sparse")}, 1, FN)),
    ],
)  # fmt: skip
def test_what_fills_blocks_otherwise_is_called_otherwise(one: Any, other: Any) -> None:
    assert packing(spec(**one[0]), *one[1:]) != packing(spec(**other[0]), *other[1:])


def test_quantised_heads_in_slots_of_their_own_move_between_any_ranks() -> None:
    fields = {"kv_quant_mode": FP8, "dtype": "torch.uint8"}
    assert packing(spec(**fields), 1, FN) == packing(spec(**fields), 4, FN) == "FP8_PER_TENSOR uint8 float8_e4m3fn"


def test_layers_of_known_kinds_are_read() -> None:
    layer = cache_layer("a", 0, spec(max_tp_shards=2), 4, 8)
    assert (layer.kind, layer.block_tokens, layer.part_bytes, layer.parts) == (LayerKind.FULL, 16, 4096, 2)
    window = cache_layer("a", 0, spec("SlidingWindowSpec", sliding_window=128), 1, 8)
    assert (window.kind, window.window) == (LayerKind.WINDOW, 128)


@pytest.mark.parametrize(
    ("kind", "fields", "says"),
    [
        ("FullAttentionSpec", {"swizzled": True}, "swizzled = True"),
        ("ChunkedLocalAttentionSpec", {}, "ChunkedLocalAttentionSpec"),
        ("RSWASpec", {}, "RSWASpec"),
        ("HiddenStateCacheSpec", {}, "HiddenStateCacheSpec"),
        ("OfSomePlugin", {}, "OfSomePlugin"),
        ("FullAttentionSpec", {"tokens_per_state": Fraction(1, 2)}, "1/2 tokens per"),
        ("SlidingWindowSpec", {"sliding_window": 8, "extra_retained_tokens": 2}, "2 extra tokens"),
        ("SlidingWindowMLASpec", {"sliding_window": 8, "bounded_replay": True}, "computed again"),
    ],
)
def test_what_is_not_known_is_refused(kind: str, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        cache_layer("a", 0, spec(kind, **fields), 1, 8)


BF16, FP32 = SimpleNamespace(itemsize=2), SimpleNamespace(itemsize=4)


def state_spec(drafts: int, **fields: Any) -> Any:
    """A convolution of 3 columns of 8 channels, and 16 numbers more."""
    shapes, dtypes = ((3 + drafts, 8), (2, 2, 4)), (BF16, FP32)
    values = {"block_size": 16, "shapes": shapes, "dtypes": dtypes, "mamba_type": SimpleNamespace(name="GDN_ATTN")}
    values |= {"num_speculative_blocks": drafts, "tp_replicated": False} | fields
    named = [(name, Any, dataclasses.field(default=0)) for name in values]
    size = (3 + drafts) * 8 * 2 + 16 * 4
    return dataclasses.make_dataclass("MambaSpec", named, namespace={"state_content_size_bytes": size})(**values)


def test_a_state_is_what_a_server_without_drafts_has_of_it() -> None:
    plain, drafted = (cache_layer("s", 0, state_spec(drafts), 2, 8) for drafts in (0, 3))
    assert plain == dataclasses.replace(drafted, gap_at=0, gap_bytes=0)
    assert (drafted.part_bytes, drafted.gap_at, drafted.gap_bytes) == (3 * 8 * 2 + 16 * 4, 3 * 8 * 2, 3 * 8 * 2)


def test_states_are_called_alike_however_many_drafts_they_have_room_for() -> None:
    forms = [
        state_forms(SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=["s"])]))
        for spec in (state_spec(0), state_spec(3), state_spec(0, shapes=((6, 8), (2, 2, 4))))
    ]
    assert forms[0] == forms[1] != forms[2]


@pytest.mark.parametrize(
    "fields",
    [
        {"mamba_type": SimpleNamespace(name="LINEAR")},
        {"mamba_type": SimpleNamespace(name="SHORT_CONV")},
        {"shapes": ((6, 8), (2, 2, 4), (1, 4)), "dtypes": (BF16, FP32, FP32)},
        {"shapes": ((3, 8), (2, 2, 4))},
        {"shapes": ((2, 2, 4), (6, 8))},
    ],
)
def test_states_that_have_room_for_drafts_elsewhere_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(LayoutError, match="room for drafts is not known"):
        cache_layer("s", 0, state_spec(3, **fields), 1, 8)


def test_what_a_newer_release_adds_is_no_trouble_while_it_is_not_used() -> None:
    assert cache_layer("a", 0, spec(swizzled=0), 1, 8).part_bytes == 4096

"""Pools of pages as layouts, and what is refused."""

from dataclasses import replace

import pytest

from engine.sglang.disaggregation.pools import Buffer, Pools, layout_of, refusal_of

PAGE = 16


def pools(*item_bytes: int, **changes: object) -> Pools:
    buffers = tuple(Buffer(pointer=4096, num_bytes=8 * size, item_bytes=size) for size in item_bytes)
    whole = Pools(buffers=buffers, page_tokens=PAGE, dtype="bfloat16", device="cpu", ranks=(("tensor parallel", 1),))
    return replace(whole, **changes)  # type: ignore[arg-type]


def test_each_buffer_is_a_layer_with_all_of_a_page_in_its_k():
    layout = layout_of("model", pools(512, 512, 512, 512))
    assert layout.block_size == PAGE
    assert [group.layers for group in layout.groups] == [(0, 1, 2, 3)]
    assert layout.slab_bytes(0) == 512


def test_buffers_of_unequal_pages_are_groups_of_their_own():
    layout = layout_of("model", pools(512, 256, 512, 256))
    assert [group.layers for group in layout.groups] == [(0, 2), (1, 3)]
    assert [layout.slab_bytes(group) for group in range(2)] == [512, 256]


def test_a_layout_carries_the_name_of_model_and_settings():
    assert layout_of("a", pools(512)).fingerprint != layout_of("b", pools(512)).fingerprint


def test_what_can_be_handed_over_is_not_refused():
    assert refusal_of(pools(512, 512)) is None


@pytest.mark.parametrize(("changes", "words"), [
    ({"ranks": (("tensor parallel", 2),)}, "2 tensor parallel ranks"),
    ({"states": ("mamba", "swa")}, "mamba, swa"),
    ({"features": ("enable_hisparse",)}, "enable_hisparse"),
    ({"device": "npu"}, "device npu"),
    ({"buffers": ()}, "no buffers"),
    ({"buffers": (Buffer(pointer=0, num_bytes=100, item_bytes=10),)}, "equal tokens"),
    ({"buffers": (Buffer(pointer=0, num_bytes=100, item_bytes=64),)}, "whole pages"),
])  # fmt: skip
def test_what_cannot_is_refused_with_its_name(changes, words):
    assert words in (refusal_of(pools(512, **changes)) or "")

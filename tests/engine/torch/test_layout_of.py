import pytest

from engine.emulated.emulated import GROUPS
from engine.torch.tiny import ARCHITECTURES


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_layout_is_the_one_the_emulation_claims(arch, engine_of):
    layout = engine_of(arch).layout
    assert layout.groups == GROUPS[arch]
    assert (layout.dtype, layout.block_size) == ("float32", 64)


def test_full_mla_keeps_the_latent_only(engine_of):
    """kv_lora_rank + qk_rope_head_dim values per token and layer: 64 + 16, four bytes each."""
    spec = engine_of("kimi_linear").layout.groups[0].spec
    assert (spec.bytes_per_token, spec.k_bytes_per_token) == (4 * (64 + 16), 4 * 64)

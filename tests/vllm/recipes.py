"""Tiny models beyond those of `engine.torch.tiny`: kinds of layers that vLLM has and the embedded engine lacks or needs not."""

from typing import Any, Final

from engine.torch import tiny

MAMBA2: Final = {key: value for key, value in tiny.RECIPES["granite_hybrid"].items() if key.startswith("mamba_")}
SLIDING: Final = ["sliding_attention"] * 3 + ["full_attention"]
RECIPES: Final[dict[str, dict[str, Any]]] = {
    "falcon_h1": {"model_type": "falcon_h1", **MAMBA2, "mamba_d_ssm": 512},  # attention beside Mamba 2 in every layer
    "cohere2": {"model_type": "cohere2", "head_dim": 64, "sliding_window": 128, "layer_types": SLIDING},
    "olmo3": {"model_type": "olmo3", "sliding_window": 128, "layer_types": SLIDING},
    "zamba2": {  # one attention layer's weights, used beside Mamba 2 in some layers
        "model_type": "zamba2",
        "num_key_value_heads": 4,
        "attention_hidden_size": 512,
        "attention_head_dim": 128,
        "layers_block_type": ["mamba", "mamba", "hybrid", "mamba"],
        "hybrid_layer_ids": [2],
        "num_mem_blocks": 1,
        "mamba_d_state": 64,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_ngroups": 1,
        "n_mamba_heads": 8,
        "chunk_size": 64,
        "use_mem_rope": True,
        "adapter_rank": 8,
    },
    "nemotron_h": {  # layers without any cache among them
        "model_type": "nemotron_h",
        "head_dim": 64,
        "layers_block_type": ["mamba", "mlp", "mamba", "attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "ssm_state_size": 64,
        "n_groups": 1,
        "conv_kernel": 4,
        "chunk_size": 64,
        "expand": 2,
    },
    "deepseek_v3": {  # multi-head latent attention: one latent for all heads
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,  # what vLLM has a kernel for: 512 + 64
        "q_lora_rank": None,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "topk_method": "noaux_tc",
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 128,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": {  # attention sinks, every other layer with a window
        "model_type": "gpt_oss",
        "head_dim": 64,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "gemma4": {  # heads of full attention are larger, and fewer, than those with a window
        "model_type": "gemma4_text",
        "head_dim": 64,
        "global_head_dim": 128,
        "num_global_key_value_heads": 1,
        "sliding_window": 128,
        "layer_types": SLIDING,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
    },
}
# As MIXER_SCALES: so that another beginning of a prompt has another end.
SCALES: Final[dict[str, dict[str, float]]] = {
    "cohere2": {"self_attn.o_proj.weight": 2.0, "self_attn.q_proj.weight": 2.0},
    "nemotron_h": {
        "mixer.down_proj.weight": 0.05,
        "mixer.out_proj.weight": 2.0,
        "mixer.o_proj.weight": 4.0,
        "mixer.q_proj.weight": 2.0,
    },
}

"""Published models as their config.json describes them: the fields that sizes follow from, written down by hand."""

LLAMA3_70B = {
    "model_type": "llama", "torch_dtype": "bfloat16", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_235B = {
    "model_type": "qwen3_moe", "torch_dtype": "bfloat16", "vocab_size": 151936, "hidden_size": 4096, "num_hidden_layers": 94,
    "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 12288, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "use_sliding_window": False, "sliding_window": None, "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "torch_dtype": "bfloat16", "vocab_size": 129280, "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256, "num_experts_per_tok": 8, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "first_k_dense_replace": 3,
    "moe_layer_freq": 1, "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}  # fmt: skip
GPT_OSS_120B = {
    "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128, "num_experts_per_tok": 4,
    "experts_per_token": 4, "sliding_window": 128, "tie_word_embeddings": False,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
    },
}  # fmt: skip
QWEN3_NEXT_80B = {
    "model_type": "qwen3_next", "torch_dtype": "bfloat16", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5120,
    "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 512, "num_experts_per_tok": 10,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN35_397B = {  # of its config.json only what KVCache follows from
    "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "vision_config": {"depth": 27},
    "text_config": {
        "model_type": "qwen3_5_moe_text", "dtype": "bfloat16", "mamba_ssm_dtype": "float32", "vocab_size": 248320,
        "hidden_size": 4096, "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 256,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 15, "linear_num_key_heads": 16,
        "linear_num_value_heads": 64, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
_KIMI_FULL = [4, 8, 12, 16, 20, 24, 27]
KIMI_LINEAR_48B = {
    "model_type": "kimi_linear", "dtype": "bfloat16", "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216,
    "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 72, "kv_lora_rank": 512,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 256,
    "num_experts_per_token": 8, "num_shared_experts": 1, "moe_intermediate_size": 1024, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "tie_word_embeddings": False,
    "linear_attn_config": {
        "full_attn_layers": _KIMI_FULL, "kda_layers": [at for at in range(1, 28) if at not in _KIMI_FULL],
        "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
    },
}  # fmt: skip
NEMOTRON_H_8B = {
    "model_type": "nemotron_h", "torch_dtype": "bfloat16", "vocab_size": 131072, "hidden_size": 4096,
    "intermediate_size": 21504, "num_hidden_layers": 52, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", "mamba_num_heads": 128,
    "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "tie_word_embeddings": False,
}  # fmt: skip
MINIMAX_M2 = {
    "model_type": "minimax_m2", "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62,
    "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 256, "num_experts_per_tok": 8,
    "attn_type_list": [1] * 62, "tie_word_embeddings": False,
}  # fmt: skip
MIMO_V2_FLASH = {
    "model_type": "mimo_v2_flash", "dtype": "bfloat16", "vocab_size": 152576, "hidden_size": 4096, "intermediate_size": 16384,
    "moe_intermediate_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 64, "num_key_value_heads": 4,
    "head_dim": 192, "v_head_dim": 128, "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "swa_head_dim": 192,
    "swa_v_head_dim": 128, "sliding_window_size": 128, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "hybrid_layer_pattern": ([0] + [1] * 4 + ([0] + [1] * 5) * 7 + [0]), "moe_layer_freq": [0] + [1] * 47,
    "tie_word_embeddings": False,
}  # fmt: skip
GEMMA3_27B = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 5376, "intermediate_size": 21504,
        "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024,
        "sliding_window_pattern": 6, "tie_word_embeddings": True,
    },
    "torch_dtype": "bfloat16",
}  # fmt: skip

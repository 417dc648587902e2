"""The names that SGLang imports on a CPU without its own kernels."""

rms_norm = fused_add_rms_norm = rotary_embedding = None

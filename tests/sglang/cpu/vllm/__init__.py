"""Stands in for vLLM where SGLang takes layers' kernels by name and calls their PyTorch forms."""

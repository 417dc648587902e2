"""What computes: transformers models on torch, and an engine without a model."""

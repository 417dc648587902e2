"""The embedded engine: transformers models on torch."""

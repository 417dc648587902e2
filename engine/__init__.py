"""Runs a model: prefill that emits KVCache layer by layer, decode with continuous batching."""

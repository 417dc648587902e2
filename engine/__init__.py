"""Runs a model: prefill that emits KVCache layer by layer, and decode of many sequences in turn, one token of each."""

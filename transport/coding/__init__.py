"""Codes KVCache smaller on its way, where the link is the bottleneck."""

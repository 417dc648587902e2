"""Additions to vLLM's API server, and the end of its processes."""

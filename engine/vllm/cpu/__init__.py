"""What vLLM's CPU build lacks or computes wrongly, done in PyTorch."""

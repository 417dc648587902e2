"""A local PD cluster: nodes that hold the role prefill or decode."""

"""Nodes under simulation: what they compute, cache, and which role they have."""

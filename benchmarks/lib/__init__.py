"""Shared by benchmarks: processes, peers, lines, trained weights."""

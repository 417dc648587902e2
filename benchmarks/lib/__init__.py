"""What benchmarks share: processes, peers, lines, trained weights."""

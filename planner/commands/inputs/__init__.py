"""Commands that make or check what the solver reads: workloads and profiles."""

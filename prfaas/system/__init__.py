"""A whole system on one machine: its topology, its processes, and their upkeep."""

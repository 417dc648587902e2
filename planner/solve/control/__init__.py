"""The controller of a running system: its observations, its decisions, the life of its plans."""

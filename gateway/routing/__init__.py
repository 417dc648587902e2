"""Where requests, prefixes and egress budgets go."""

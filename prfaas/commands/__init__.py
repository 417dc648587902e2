"""One module per command that asks or prepares a system."""

"""Commands for a running plan service, and the one that runs it."""

"""The receiving end: one listener for all peers, and the registry of what it expects."""

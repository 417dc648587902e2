"""The simulated gateway: who enters, and what is expected of each node."""

"""Clients that nobody here wrote, against a running gateway. Each lives in an environment of its own."""

"""Clients from other projects, against a running gateway. Each lives in an environment of its own."""

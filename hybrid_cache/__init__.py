"""Tracks what is cached, where, and how much of it a request can reuse. Decisions are pure; only the disk tier does
I/O, in a thread."""

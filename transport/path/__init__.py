"""The path between two ends: sockets, shared memory, and the present capacity of a link."""

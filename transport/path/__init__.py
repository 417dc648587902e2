"""What lies between two ends: sockets, shared memory, and what a link can carry at this moment."""

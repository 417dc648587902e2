"""The wire protocol as values: frames, ranges, manifests, seals. No sockets."""

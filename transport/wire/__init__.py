"""What two ends of a connection say to each other, as values: frames, ranges, manifests, seals. No sockets."""

"""One-sided writes and reads in batches: over this package, Mooncake's Transfer Engine or NIXL."""

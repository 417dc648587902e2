"""Names of cached blocks: a chain of SHA-256 over tokens."""

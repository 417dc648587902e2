"""KVCache on loopback and on emulated wide-area links."""

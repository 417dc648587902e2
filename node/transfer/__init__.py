"""KVCache that leaves for other nodes, and KVCache that arrives from them."""

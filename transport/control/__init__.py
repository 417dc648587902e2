"""What processes say to each other beside KVCache: messages of a node's socket, gRPC between nodes, certificates."""

"""Control messages between processes: those of a node's socket, gRPC between nodes, and certificates."""

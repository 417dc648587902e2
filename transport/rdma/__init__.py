"""KVCache over RDMA within a cluster: NICs, the rails between them, and both ends of a transfer over them."""

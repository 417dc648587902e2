"""Two sites in network namespaces, and what somebody sees who listens between them."""

"""What of a node and a gateway grows with a model's layers, a cache's blocks and a fleet's nodes."""

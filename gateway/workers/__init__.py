"""Several processes that serve as one gateway, and what they share."""

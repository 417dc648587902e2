"""The node's pages: the arena, its SSD tier, and prefixes that are kept on request."""

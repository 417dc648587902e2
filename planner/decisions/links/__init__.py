"""Which links are used, and how senders share what a link carries."""

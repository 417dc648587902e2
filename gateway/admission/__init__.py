"""How many requests are served at once, in which order, and who is refused."""

"""How many requests are served at once, in which order, and which are refused."""

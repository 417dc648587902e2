"""Who the other end is, by its certificate, and what it may ask for."""

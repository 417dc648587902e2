"""Chooses what leaves next: transfers, and the pure scheduler that deals them to lanes."""

"""What to buy and rent, month after month, at least cost."""

"""The transfers that a listener expects, and its connections. Its threads share them."""

"""A lane at work: its connections, and the thread that feeds them."""

"""What is cached, where, and how much of it a request can reuse. Pure."""

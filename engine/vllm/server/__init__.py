"""What is added to vLLM's API server, and how its processes end."""

"""vLLM servers with our connector."""

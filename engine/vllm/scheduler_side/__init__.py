"""The connector beside vLLM's scheduler: what is asked of the agent for a request."""

"""The connector beside vLLM's scheduler: its requests to the agent."""

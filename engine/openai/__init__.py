"""The OpenAI surface of an engine."""

"""The front door: OpenAI HTTP in, routed prefill and decode legs out."""

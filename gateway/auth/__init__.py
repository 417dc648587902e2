"""Who asks: API keys, and signed tokens of an identity provider."""

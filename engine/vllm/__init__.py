"""vLLM as the engine of a node: its launch, and the KV connector that it loads."""

"""The connector in vLLM's workers: copies between KV tensors and the page arena."""

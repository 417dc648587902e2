"""A PrfaaS cluster: prefill nodes whose KVCache leaves for other clusters."""

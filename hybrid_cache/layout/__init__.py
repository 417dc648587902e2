"""The layout of a model's KVCache: where its bytes lie, and what each layer keeps."""

"""Where the bytes of a model's KVCache lie, and what each layer keeps."""

"""KVCache made smaller on its way, where the link is what binds."""

"""The engine's end of its node: the socket, the pages of a job, the KVCache's identity."""

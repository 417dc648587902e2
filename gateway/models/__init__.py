"""The models of one gateway: which one a request is for, and what serves each."""

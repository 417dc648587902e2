"""The prefix cache of one node: its tree, its pages, and transactions of requests over them."""

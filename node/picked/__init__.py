"""Requests that an endpoint picker has picked the node for, and the prefill legs that nodes ask each other for."""

"""Prefill-as-a-Service: the command line and the processes it starts."""

__version__ = "0.1.0"

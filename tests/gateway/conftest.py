"""Every test leaves the process as it found it; tasks are counted by `worlds.on_loop`."""

from tests.leaks import grpc_poller, nothing_leaks

__all__ = ["grpc_poller", "nothing_leaks"]

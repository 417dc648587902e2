"""Every test leaves the process as it found it; tasks are counted by `worlds.on_loop`."""

from tests.leaks import kept_by_libraries, nothing_leaks

__all__ = ["kept_by_libraries", "nothing_leaks"]

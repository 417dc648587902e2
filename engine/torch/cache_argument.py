"""The name under which a model takes its cache: transformers renamed `past_key_values` to `cache` in some release."""

import inspect
from typing import Any, Final

_NAMES: Final = ("cache", "past_key_values")


def cache_argument(module: Any) -> str:
    """The name of the argument of a module's `forward` that holds the cache: the nearest class that names it decides."""
    for each in type(module).__mro__:
        if forward := each.__dict__.get("forward"):
            parameters = inspect.signature(forward).parameters
            if name := next((name for name in _NAMES if name in parameters), None):
                return name
    return _NAMES[-1]

"""Events of a stream, as servers write them."""

import json
from typing import Any


def event(value: dict[str, Any], separators: tuple[str, str] | None = None) -> bytes:
    """One with this as its data."""
    return b"data: " + json.dumps(value, separators=separators).encode() + b"\n\n"

"""How much memory an object takes."""

import gc
import sys
from types import ModuleType


def size_of(root: object) -> int:
    """Bytes of everything that can be reached from an object, code left out."""
    seen: set[int] = set()
    pending, total = [root], 0
    while pending:
        item = pending.pop()
        if id(item) in seen or isinstance(item, type | ModuleType) or callable(item):
            continue
        seen.add(id(item))
        total += sys.getsizeof(item)
        pending += gc.get_referents(item)
    return total

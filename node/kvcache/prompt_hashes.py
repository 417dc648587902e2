"""The block hashes of prompts, as messages carry them: read, and looked over for what cannot be."""

import asyncio
from typing import Final

from hybrid_cache.hashing import block_hash as hashing
from node.errors import NodeRefusal

READ_HASHES: Final = 8192  # of a long prompt, before other work has its turn
TWICE: Final = "a block hash appears twice: the hashes are not chained"


def split_hashes(joined: bytes) -> list[bytes]:
    """A message's block hashes as a list. Raises NodeRefusal for a length that cannot be."""
    try:
        return hashing.split_hashes(joined)
    except ValueError as exc:
        raise NodeRefusal("bad_request", str(exc)) from exc


class CheckedHashes(list[bytes]):
    """Block hashes of a prompt. None of them appears twice."""


async def read_hashes(joined: bytes, *, is_long: bool) -> CheckedHashes:
    """A message's block hashes: of a long prompt in steps. Raises NodeRefusal."""
    found = CheckedHashes()
    for start in range(0, len(joined), READ_HASHES * hashing.HASH_BYTES):
        found += split_hashes(joined[start : start + READ_HASHES * hashing.HASH_BYTES])
        if is_long:
            await asyncio.sleep(0)
    if hashing.have_repeats(joined):
        raise NodeRefusal("bad_request", TWICE)
    return found

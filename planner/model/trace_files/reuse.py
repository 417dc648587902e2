"""When blocks of prompts are used again: reuse times and lifespans, by category of request.

The terms are those of "KVCache Cache in the Wild". The reuse time is the time between two uses of a block, by requests one
after the other. It is of the category of the former, which left the block in a cache. The lifespan is the time between the
first and the last use, 0 for a block that is used once. It is of the category of the request that used the block first.
Uses before and after the trace are not known, so both are at most its span.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from planner.model.profile import Floats
from planner.model.trace_files.blocks import Places, PromptBlocks
from planner.model.trace_files.categories import RequestCategories

MOST_USES: Final = 1 << 22  # sorted at once; of more, those of a sample of blocks
PROMPTS_AT_ONCE: Final = 16_384
QUANTILES: Final = (0.5, 0.9, 0.99)
Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class BlockUses:
    """Uses in order of requests: the hash of the block, and which request it was. Of all blocks a `share` is sampled."""

    hashes: Hashes
    requests: npt.NDArray[np.int32]
    share: float


def reuse_by_category(
    arrival_s: Floats, blocks: Sequence[tuple[int, ...]], categories: RequestCategories, most_uses: int = MOST_USES
) -> dict[str, Any]:
    """The JSON form of reuse times and lifespans, of each category and of all."""
    uses = sampled_uses(blocks, most_uses)
    order = np.argsort(uses.hashes, kind="stable")
    hashes, requests = uses.hashes[order], uses.requests[order]
    # A prompt that names a block twice uses it once.
    is_use = np.append(True, (np.diff(hashes) != 0) | (np.diff(requests) != 0))[: len(hashes)]
    hashes, requests = hashes[is_use], requests[is_use]
    is_reuse = np.diff(hashes) == 0
    former, latter = requests[:-1][is_reuse], requests[1:][is_reuse]
    first = requests[np.append(True, ~is_reuse)[: len(requests)]]
    last = requests[np.append(~is_reuse, True)[: len(requests)]]
    reuse_s, reuse_of = arrival_s[latter] - arrival_s[former], categories.codes[former]
    life_s, life_of = arrival_s[last] - arrival_s[first], categories.codes[first]
    use_of = categories.codes[requests]
    counts = np.bincount(categories.codes, minlength=len(categories.names)).tolist()
    rows = [
        {"category": name, "requests": count}
        | _times(reuse_s[reuse_of == code], life_s[life_of == code], int((use_of == code).sum()))
        for code, (name, count) in enumerate(zip(categories.names, counts, strict=True))
        if count
    ]
    rows.append({"category": "all", "requests": len(categories.codes)} | _times(reuse_s, life_s, len(requests)))
    return {"sampled_blocks_share": uses.share, "categories_are": str(categories.source), "by_category": rows}


def _times(reuse_s: Floats, life_s: Floats, uses: int) -> dict[str, Any]:
    """`reused_share`: of all uses, those after which the block was used again."""
    return {
        "sampled_blocks": len(life_s),
        "reused_share": len(reuse_s) / uses if uses else None,
        "reuse_s": _quantiles(reuse_s),
        "lifespan_s": _quantiles(life_s),
    }


def _quantiles(values: Floats) -> dict[str, float] | None:
    if not len(values):
        return None
    return {
        f"p{round(100 * at)}": float(found) for at, found in zip(QUANTILES, np.quantile(values, QUANTILES), strict=True)
    }


def sampled_uses(blocks: Sequence[tuple[int, ...]], most_uses: int) -> BlockUses:
    """All uses, or those of so many blocks, by hash, that at most `most_uses` are kept: 1, 1/2, 1/4 … of all blocks."""
    kept: list[tuple[Hashes, npt.NDArray[np.int32]]] = []
    count = halvings = 0
    for names, requests in _pieces(blocks):
        kept.append(_within(halvings, _mixed(names), requests))
        count += len(kept[-1][0])
        while count > most_uses:
            halvings += 1
            kept = [_within(halvings, *piece) for piece in kept]
            count = sum(len(hashes) for hashes, _ in kept)
    return BlockUses(
        np.concatenate([np.empty(0, np.uint64), *(hashes for hashes, _ in kept)]),
        np.concatenate([np.empty(0, np.int32), *(requests for _, requests in kept)]),
        0.5**halvings,
    )


def _within(halvings: int, hashes: Hashes, requests: Any) -> tuple[Hashes, npt.NDArray[np.int32]]:
    """Those with so many leading zero bits."""
    if not halvings:
        return hashes, requests
    is_kept = hashes >> np.uint64(64 - halvings) == 0
    return hashes[is_kept], requests[is_kept]


def _mixed(names: Hashes) -> Hashes:
    """Spreads names over 64 bits, no two of them to the same place (the finaliser of SplitMix64)."""
    mixed = names + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _pieces(blocks: Sequence[tuple[int, ...]]) -> Iterator[tuple[Hashes, npt.NDArray[np.int32]]]:
    """The names of many prompts at a time, as 64 bits each, and which prompt has each of them."""
    begin = 0
    found = blocks.pieces(PROMPTS_AT_ONCE) if isinstance(blocks, PromptBlocks) else _pieces_of_tuples(blocks)
    for names, counts in found:
        requests = np.arange(begin, begin + len(counts), dtype=np.int32)
        yield names, np.repeat(requests, counts)
        begin += len(counts)


def _pieces_of_tuples(blocks: Sequence[tuple[int, ...]]) -> Iterator[tuple[Hashes, Places]]:
    prompts = iter(blocks)
    while piece := list(islice(prompts, PROMPTS_AT_ONCE)):
        counts = np.array([len(names) for names in piece], dtype=np.int64)
        yield np.fromiter(map(hash, chain.from_iterable(piece)), dtype=np.uint64, count=int(counts.sum())), counts

"""What a fitted workload says, each part in plain values, checked as it is read."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from planner.model.reading import SHARE, TOKENS, Range, number, placed
from planner.model.trace_files.arrivals import KeptArrivals
from planner.model.trace_files.categories import MOST_CATEGORIES
from planner.model.traffic import Lengths
from transport.control.settings import require, require_table

CACHE: Final = Range(0, 1e9, "GB")
# What a fitted workload may know of its lengths (`Lengths`), beside how often each is.
KNOWN_OF_LENGTHS: Final = MappingProxyType({"held": SHARE, "computed": TOKENS, "cached": TOKENS, "landed": TOKENS})
BURSTS: Final = Range(0, 1e9)
BURST_S: Final = 10.0  # some services: a queue forgets in about this
WEIGHT_SLACK: Final = 1e-6  # by which the weights of a fitted workload may miss 1


def caches_of(table: Mapping[str, Any]) -> dict[str, float | None] | None:
    if "caches_gb" not in table:
        return None
    with placed("caches_gb"):
        said = require_table(table["caches_gb"], "caches_gb")
        return {name: None if size is None else CACHE.of(name, size) for name, size in said.items()}


def longest_of(table: Mapping[str, Any]) -> float | None:
    """The longest prompt, which workloads of a gateway's metrics do not know."""
    if "prompt_tokens" not in table:
        return None
    with placed("prompt_tokens"):
        return number(require_table(table["prompt_tokens"], "prompt_tokens"), "max", TOKENS)


def burst_index_of(table: Mapping[str, Any]) -> float:
    """That of the queues' own time; of few requests none is known."""
    with placed("burst_index"):
        said = require_table(table.get("burst_index") or {}, "burst_index").get(f"{BURST_S:g}_s")
        return 1.0 if said is None else max(1.0, BURSTS.of(f"{BURST_S:g}_s", said))


def output_spread_of(table: Mapping[str, Any]) -> float:
    """0.0 for a workload that does not tell it."""
    if "output_tokens" not in table:
        return 0.0
    with placed("output_tokens"):
        said = require_table(table["output_tokens"], "output_tokens").get("spread", 0.0)
        return BURSTS.of("spread", said)


def arrivals_of(table: Mapping[str, Any]) -> KeptArrivals | None:
    if table.get("arrivals") is None:
        return None
    with placed("arrivals"):
        return KeptArrivals.read(require_table(table["arrivals"], "arrivals"))


def lengths_of(table: Mapping[str, Any]) -> Lengths:
    """Lengths that go up, and the share of requests that have each; of files that know it, what decode nodes compute and what is
    cached. Raises SettingsError.
    """
    columns: dict[str, list[float]] = {}
    for key, allowed in (("tokens", TOKENS), ("weights", SHARE), *KNOWN_OF_LENGTHS.items()):
        if key not in table and key in KNOWN_OF_LENGTHS:
            continue
        column, place = table.get(key), f"uncached_tokens.{key}"
        require(isinstance(column, list) and len(column) > 0, place, column, "numbers, at least one")
        columns[key] = [allowed.of(f"{place}[{at}]", value) for at, value in enumerate(column or ())]
        count = len(columns["tokens"])
        require(len(columns[key]) == count, place, columns[key], f"{count}, as there are lengths")
    tokens, weights = columns["tokens"], columns["weights"]
    for at, (before, after) in enumerate(pairwise(tokens), 1):
        require(before < after, f"uncached_tokens.tokens[{at}]", after, f"above the one before it, {before:g}")
    total = sum(weights)
    require(
        abs(total - 1) <= WEIGHT_SLACK,
        "uncached_tokens.weights, their sum",
        total,
        "1: they are shares of the requests",
    )
    known = {key: np.array(columns[key]) for key in KNOWN_OF_LENGTHS if key in columns}
    shares = [column for _, column in _categories(table, len(tokens))]
    if shares:
        known["categories"] = np.array(shares).T
    return Lengths(np.array(tokens), np.array(weights) / total, **known)


def category_names_of(table: Mapping[str, Any]) -> tuple[str, ...]:
    """Of a workload's `uncached_tokens`."""
    return tuple(name for name, _ in _categories(table, len(table["tokens"])))


def _categories(table: Mapping[str, Any], lengths: int) -> Iterator[tuple[str, list[float]]]:
    """The name of each category, and its share of each length's requests. Raises SettingsError."""
    said = require_table(table.get("categories", {}), "uncached_tokens.categories")
    require(len(said) <= MOST_CATEGORIES, "categories", len(said), f"at most {MOST_CATEGORIES}")
    for name, column in said.items():
        place = f"uncached_tokens.categories.{name}"
        fits = isinstance(column, list) and len(column) == lengths
        require(fits, place, column, f"{lengths} numbers, as there are lengths")
        yield name, [SHARE.of(f"{place}[{at}]", value) for at, value in enumerate(column)]

"""How soon answers must begin, and how fast they go on."""

from dataclasses import dataclass
from math import inf
from typing import Any, Final

import numpy as np

from planner.model.profile import Floats
from planner.model.reading import SECONDS, TOKENS, Range, named
from planner.model.trace_files.categories import MOST_NAME
from transport.control.settings import build, require

SHARE_IN_TIME: Final = Range(0.0, 0.9999)
P90: Final = 0.9
MOST_TARGETS: Final = 16
NUMBERS: Final = {"ttft_s": SECONDS, "share": SHARE_IN_TIME, "above_tokens": TOKENS, "up_to_tokens": TOKENS}


@dataclass(frozen=True, slots=True, kw_only=True)
class TtftTarget:
    """A share of some requests has its first token within `ttft_s`: those of one category, of prompts of some lengths, or of
    both. Lengths are those of whole prompts, with what of them is cached.
    """

    ttft_s: float
    share: float = P90
    category: str | None = None
    above_tokens: float = 0.0
    up_to_tokens: float = inf

    def __post_init__(self) -> None:
        SECONDS.above_low("ttft_s", self.ttft_s)
        SHARE_IN_TIME.above_low("share", self.share)
        TOKENS.of("above_tokens", self.above_tokens)
        if self.up_to_tokens < inf:
            TOKENS.of("up_to_tokens", self.up_to_tokens)
        wider = self.above_tokens < self.up_to_tokens
        require(wider, "up_to_tokens", self.up_to_tokens, f"more than above_tokens, {self.above_tokens:g}")
        if self.category is not None:
            fits = 0 < len(self.category) <= MOST_NAME and self.category.isprintable()
            require(fits, "category", self.category, f"a text of 1 to {MOST_NAME} characters")

    @property
    def name(self) -> str:
        """What requests it is of."""
        parts = [] if self.category is None else [self.category]
        if self.above_tokens:
            parts.append(f"above {self.above_tokens:,.0f} tokens")
        if self.up_to_tokens < inf:
            parts.append(f"up to {self.up_to_tokens:,.0f} tokens")
        return " ".join(parts) or "all"

    def has(self, prompt_tokens: Floats) -> Any:
        """Whether prompts of these lengths are among its own."""
        return (prompt_tokens > self.above_tokens) & (prompt_tokens <= self.up_to_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Targets: TTFT at P90, TBT by Mooncake's definition (mean of a request's longest tenth of intervals). `targets` are TTFTs of
    some of the requests, to be kept as well.
    """

    ttft_p90_s: float | None = None
    tbt_s: float | None = None
    targets: tuple[TtftTarget, ...] = ()
    provenance: str = ""

    def __post_init__(self) -> None:
        for name in ("ttft_p90_s", "tbt_s"):
            if (target := getattr(self, name)) is not None:
                SECONDS.above_low(name, target)
        names = [target.name for target in self.targets]
        require(len(names) <= MOST_TARGETS, "targets", f"{len(names)} of them", f"at most {MOST_TARGETS}")
        require(len(set(names)) == len(names), "targets", names, "of different requests")

    @property
    def ttft_targets(self) -> tuple[TtftTarget, ...]:
        """All of them, that of all requests first."""
        everybody = () if self.ttft_p90_s is None else (TtftTarget(ttft_s=self.ttft_p90_s),)
        return (*everybody, *self.targets)


def parsed_target(text: str) -> TtftTarget:
    """`ttft_s=2,up_to_tokens=8000,category=chat`: the keys of a target in a site file. Raises InputError."""
    with named(f"target {text!r}"):
        table: dict[str, Any] = {}
        for part in text.split(","):
            key, separator, value = part.partition("=")
            key = key.strip()
            require(bool(separator), "part", part, "key=value")
            require(key not in table, key, value, "there once")
            table[key] = NUMBERS[key].of_text(key, value) if key in NUMBERS else value.strip()
        return build(TtftTarget, table, "")


def fastest(targets: tuple[TtftTarget, ...], prompt_tokens: Floats, categories: Any, otherwise_s: float) -> Floats:
    """The TTFT by which each request is in time: the least of the targets that it is among, else `otherwise_s`.

    `categories` are names, one for each request, or None where none is known.
    """
    found = np.full(len(prompt_tokens), inf)
    for target in targets:
        own = members(target, prompt_tokens, categories)
        found[own] = np.minimum(found[own], target.ttft_s)
    return np.where(np.isinf(found), otherwise_s, found)


def members(target: TtftTarget, prompt_tokens: Floats, categories: Any) -> Any:
    """Whether each request is among a target's own."""
    has = target.has(prompt_tokens)
    if target.category is None:
        return has
    return has & (categories == target.category) if categories is not None else np.zeros_like(has)

"""Traffic: lengths of prompts (uncached part) and of answers, and their rates.

A distribution of lengths is a sorted array of lengths with weights that sum to 1. A parametric one is cut into bins of
equal probability, each represented by its conditional mean. So sums over bins are exact up to the curvature inside one
bin.
"""

from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Final

import numpy as np

from planner.errors import InputError
from planner.model.normal import normal_cdf, normal_quantile
from planner.model.profile import Floats
from planner.model.reading import LEAST, TOKENS

DEFAULT_BINS: Final = 200_000
MIN_SIGMA: Final = 1e-3
MAX_SIGMA: Final = 20.0
MIN_MASS: Final = 1e-6  # of a law between its ends; less is a rounding error of it
NEXT_TO_0: Final = float(np.nextafter(0.0, 1.0))
NEXT_TO_1: Final = float(np.nextafter(1.0, 0.0))


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """Distinct prompt lengths (tokens, ascending) and the share of requests that have each.

    Lengths may be the rests of prompts that PD clusters do not have cached. Routing compares these with t. Then more is known, in
    the mean of each length: `held`, the share of its requests that decode nodes compute themselves; `computed`, the tokens that
    are computed, fewer where PrfaaS holds more; `cached`, those before them; and `landed`, those whose attention decode nodes
    hold, with a state or without. `categories` has a column for each category of requests: their share of each length's.
    """

    tokens: Floats
    weights: Floats
    held: Floats | None = None
    computed: Floats | None = None
    cached: Floats | None = None
    landed: Floats | None = None
    categories: Floats | None = None

    @classmethod
    def of(
        cls,
        samples: Floats,
        *,
        held: Floats | None = None,
        computed: Floats | None = None,
        cached: Floats | None = None,
        landed: Floats | None = None,
        codes: Any = None,
        names: int = 0,
    ) -> "Lengths":
        """The empirical distribution of `samples`, in any order, and what is known of each; `codes` are their categories, of so
        many `names`. Raises InputError when empty or not positive.
        """
        if not len(samples):
            raise InputError("workload: no requests; give at least one length")
        if (wrong := ~(np.isfinite(samples) & (samples >= 0))).any():
            raise InputError(f"workload: length {samples[wrong][0]}: must be at least 0 and finite")
        tokens, which, counts = np.unique(
            np.asarray(samples, dtype=np.float64), return_inverse=True, return_counts=True
        )
        weights = np.asarray(counts, dtype=np.float64) / float(len(samples))
        known = [_means(values, which, counts) for values in (held, computed, cached, landed)]
        if codes is not None:
            pairs = np.bincount(which * names + codes, minlength=len(tokens) * names)
            known.append(pairs.reshape(len(tokens), names) / counts[:, None])
        return cls(tokens, weights, *known)

    @property
    def prefilled(self) -> Floats:
        """The share of requests that have each length and are computed by prefill nodes."""
        return self.weights if self.held is None else self.weights * (1.0 - self.held)

    @property
    def held_share(self) -> float:
        """The share of requests that decode nodes compute themselves."""
        return 0.0 if self.held is None else float(self.weights @ self.held)

    def less_held(self, share: float) -> "Lengths":
        """Where decode nodes compute that share less of what they would."""
        return self if self.held is None else replace(self, held=self.held * (1.0 - share))

    def with_nothing_held(self) -> "Lengths":
        """While decode nodes' caches are empty; others have what they have."""
        if self.held is None:
            return self
        landed = None if self.landed is None else np.zeros_like(self.landed)
        return replace(self, held=np.zeros_like(self.held), landed=landed)

    def part(self, kept: slice) -> "Lengths":
        """Some of the lengths, neighbours of each other; their weights are still shares of all requests."""
        known = (self.held, self.computed, self.cached, self.landed, self.categories)
        more = (None if values is None else values[kept] for values in known)
        return Lengths(self.tokens[kept], self.weights[kept], *more)

    def alone(self) -> "Lengths":
        """What is computed, as prompts with nothing before them."""
        tokens, which = np.unique(self.uncached, return_inverse=True)
        return Lengths(tokens, np.bincount(which, self.weights).astype(np.float64))

    @property
    def sent(self) -> tuple[Floats, Floats | None]:
        """The tokens whose attention is sent to decode nodes, in the mean of each length, and those that are there."""
        if self.landed is None or self.cached is None:
            return self.uncached, self.cached
        return self.uncached + self.cached - self.landed, self.landed

    @property
    def uncached(self) -> Floats:
        """The tokens that are computed, in the mean of each length."""
        return self.tokens if self.computed is None else self.computed

    @property
    def prompts(self) -> Floats:
        """The tokens of whole prompts, in the mean of each length."""
        return self.uncached if self.cached is None else self.uncached + self.cached

    @property
    def mean(self) -> float:
        return float(self.tokens @ self.weights)

    def quantile(self, share: float) -> float:
        """The least length that at least `share` of the requests do not exceed."""
        at = np.searchsorted(np.cumsum(self.weights), share - 1e-12)
        return float(self.tokens[min(int(at), len(self.tokens) - 1)])

    def share_above(self, threshold_tokens: float) -> float:
        """p = P(L > t)."""
        return float(self.weights[self.tokens > threshold_tokens].sum())

    def thinned(self, bins: int) -> "Lengths":
        """At most `bins` lengths of nearly equal weight, each the mean of those it stands for; the mean is kept."""
        if len(self.tokens) <= bins:
            return self
        ends = np.cumsum(self.weights)
        label = np.minimum((ends - self.weights / 2) * bins, bins - 1).astype(np.int64)
        weights = np.bincount(label, self.weights, bins).astype(np.float64)
        sums = np.bincount(label, self.weights * self.tokens, bins).astype(np.float64)
        kept = weights > 0
        held, computed, cached, landed = (
            None if values is None else np.bincount(label, self.weights * values, bins)[kept] / weights[kept]
            for values in (self.held, self.computed, self.cached, self.landed)
        )
        held = None if held is None else np.minimum(held, 1.0)  # rounding
        categories = None
        if self.categories is not None:
            shares = [np.bincount(label, self.weights * column, bins)[kept] for column in self.categories.T]
            categories = np.array(shares).T / weights[kept][:, None]
        return Lengths(sums[kept] / weights[kept], weights[kept], held, computed, cached, landed, categories)

    def sample(self, size: int, rng: np.random.Generator) -> Floats:
        """`size` lengths drawn with replacement."""
        at = np.searchsorted(np.cumsum(self.weights), rng.random(size), side="right")
        return self.tokens[np.minimum(at, len(self.tokens) - 1)]


def _means(values: Floats | None, which: Any, counts: Any) -> Floats | None:
    """The mean of each group of values."""
    if values is None:
        return None
    return np.asarray(np.bincount(which, values, len(counts)) / counts, dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncatedLogNormal:
    """ln L ~ N(mu, sigma²), given min_tokens ≤ L ≤ max_tokens (paper §4.1)."""

    mu: float
    sigma: float
    min_tokens: float
    max_tokens: float

    def __post_init__(self) -> None:
        if not MIN_SIGMA <= self.sigma <= MAX_SIGMA:
            raise InputError(f"sigma={self.sigma}: must be {MIN_SIGMA:g} to {MAX_SIGMA:g}")
        if not LEAST <= self.min_tokens < self.max_tokens <= TOKENS.high:
            ends = f"min_tokens={self.min_tokens}, max_tokens={self.max_tokens}"
            raise InputError(f"{ends}: need 0 < min < max, and at most {TOKENS.high:g}")
        low, high = self._ends() if isfinite(self.mu) else (0.0, 0.0)
        if not high - low >= MIN_MASS:
            ends = f"{self.min_tokens:g} to {self.max_tokens:g}"
            raise InputError(
                f"mu={self.mu}, sigma={self.sigma}: {high - low:.2g} of the lengths would be {ends} tokens; "
                f"choose a mean, exp(mu + sigma²/2), that lies there"
            )

    def __str__(self) -> str:
        return f"lognormal({self.mu:.2f}, {self.sigma:.2f}) in [{self.min_tokens:.0f}, {self.max_tokens:.0f}]"

    def quantile(self, share: Floats) -> Floats:
        """The length that a share of the requests does not exceed."""
        low, high = self._ends()
        within = np.clip(low + share * (high - low), NEXT_TO_0, NEXT_TO_1)  # 0 and 1 lie at infinity
        quantile = np.exp(self.mu + self.sigma * normal_quantile(within))
        quantile = np.where(share <= 0, self.min_tokens, np.where(share >= 1, self.max_tokens, quantile))
        return np.asarray(np.clip(quantile, self.min_tokens, self.max_tokens), dtype=np.float64)

    def means_between(self, edges_tokens: Floats) -> Floats:
        """E[L; low < L ≤ high] of neighbouring edges: the part of the mean that lies there (not over its probability)."""
        low, high = self._ends()
        below = normal_cdf(self._z(np.clip(edges_tokens, self.min_tokens, self.max_tokens)) - self.sigma)
        return np.asarray(np.exp(self.mu + self.sigma**2 / 2) * np.diff(below) / (high - low), dtype=np.float64)

    def lengths(self, bins: int = DEFAULT_BINS) -> Lengths:
        """`bins` equally likely lengths whose mean is exact."""
        edges = self.quantile(np.linspace(0.0, 1.0, bins + 1))
        means = self.means_between(edges) * bins
        # Cancellation can push a mean out of its bin by an ulp; lengths must stay sorted.
        return Lengths(np.clip(means, edges[:-1], edges[1:]), np.full(bins, 1.0 / bins))

    def _ends(self) -> Floats:
        return normal_cdf(self._z(np.array([self.min_tokens, self.max_tokens])))

    def _z(self, tokens: Floats) -> Floats:
        return np.asarray((np.log(tokens) - self.mu) / self.sigma, dtype=np.float64)

"""What a prefill takes on a node, learned from what prefills took: least squares that forget, in bounded memory.

    seconds(u, c) = a0 + a1·u + a2·u·(2c + u)      u tokens computed behind c cached ones

which is T(c + u) − T(c) + T(0) of a quadratic T, as the profiles have it: every token costs the layers, and attends to all
before it. Old samples fade, so that a node which has become slower is believed after a few hundred prompts.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import exp, exp2
from typing import Final, NamedTuple

from planner.decisions.views import NodeView, PrefillCost

MOVES_REMEMBERED: Final = 16.0
CALLS_S: Final = 0.01  # of a move: Reserve, Load and Commit
DELAY_HALVES_S: Final = 60.0  # a delay: moves are tried again some minutes after they have failed
MOST_DELAY_S: Final = 600.0  # no prompt computes for longer, and a greater delay would only take longer to fade
LEAST_DELAY_S: Final = 1e-3  # decides nothing
LEAST_SLOPE: Final = 1e-13  # s per byte: no memory is copied faster than 10 TB/s
PREFILL_SHARE_S: Final = 10.0  # how long ago "lately" is: some tens of prompts
MEMORY: Final = 64.0  # prompts after which a sample's weight has fallen to 1/e
PRIOR_WEIGHT: Final = 0.005  # of a sample: enough to say what no sample has, not enough to argue with one
PROBES: Final = (
    (500, 0),
    (8_000, 0),
    (32_000, 0),
    (2_000, 64_000),
)  # (computed, cached) at which the prior has its say
ERRORS_KEPT: Final = 256
BELIEVED: Final = 8  # samples from which on a node's own estimate is better than its cluster's
LEAST_S: Final = 1e-6  # what took less was not measured, and would outweigh all that was
RIDGE: Final = (
    1e-12  # of a diagonal: more than rounding takes from it, so that equations that nearly agree can be solved
)
TOKENS: Final = 1000.0  # features in thousands of tokens: the normal equations are well conditioned

Coefficients = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Error:
    """Relative errors |predicted / seen − 1| of late predictions, each made before its sample was learned from."""

    mean: float = 0.0
    p90: float = 0.0
    samples: int = 0


class PrefillEstimate:
    """One node's curve, or one cluster's."""

    def __init__(self, prior: Coefficients) -> None:
        """`prior`: (s, s per 1000 tokens, s per (1000 tokens)²), believed until samples say otherwise."""
        self.samples = 0
        self._prior = prior
        self._products = [[0.0] * 3 for _ in range(3)]
        self._sums = [0.0] * 3
        self._seconds = self._expected_s = self._tokens = 0.0
        self._known: Coefficients | None = prior
        self._errors: deque[float] = deque(maxlen=ERRORS_KEPT)

    def observe(self, computed_tokens: int, cached_tokens: int, seconds: float) -> None:
        """A prefill took `seconds` from its start to its end. What took next to no time is no sample."""
        if computed_tokens <= 0 or seconds < LEAST_S:
            return
        self._errors.append(abs(self.seconds(computed_tokens, cached_tokens) / seconds - 1.0))
        fade = 1.0 - 1.0 / MEMORY
        # Over the seconds seen: what counts is the relative error, for short prompts as much as for long ones.
        row = [each / seconds for each in _features(computed_tokens, cached_tokens)]
        for i in range(3):
            self._sums[i] = self._sums[i] * fade + row[i]
            for j in range(3):
                self._products[i][j] = self._products[i][j] * fade + row[i] * row[j]
        self._seconds = self._seconds * fade + seconds
        self._expected_s = self._expected_s * fade + _value(self._prior, _features(computed_tokens, cached_tokens))
        self._tokens = self._tokens * fade + computed_tokens
        self.samples += 1
        self._known = None

    def seconds(self, computed_tokens: int, cached_tokens: int) -> float:
        """Predicted time to compute `computed_tokens` behind `cached_tokens`."""
        return _value(self.coefficients, _features(max(0, computed_tokens), cached_tokens))

    @property
    def seconds_per_token(self) -> float:
        """What a computed token took on average, whatever the prompts were: for queues of unknown lengths."""
        if self._tokens:
            return self._seconds / self._tokens
        return self._prior[1] / TOKENS

    @property
    def error(self) -> Error:
        if not self._errors:
            return Error()
        ordered = sorted(self._errors)
        return Error(sum(ordered) / len(ordered), ordered[int(0.9 * (len(ordered) - 1))], len(ordered))

    @property
    def coefficients(self) -> Coefficients:
        """(s, s per 1000 tokens, s per (1000 tokens)²); none is negative: more tokens never take less time."""
        if self._known is None:
            self._known = self._fit()
        return self._known

    def _fit(self) -> Coefficients:
        free = [0, 1, 2]
        while True:
            found = _solve(*self._with_prior(), free)
            negative = [i for i in free if found[i] < 0]
            if not negative:
                return found[0], found[1], found[2]
            free.remove(min(negative, key=lambda i: found[i]))

    def _with_prior(self) -> tuple[list[list[float]], list[float]]:
        """The equations, and in them the prior's shape at the height of what was seen: the first sample leaves them open."""
        height = self._seconds / self._expected_s if self._expected_s else 1.0
        products = [list(row) for row in self._products]
        sums = list(self._sums)
        for computed, cached in PROBES:
            features = _features(computed, cached)
            row = [each / (height * _value(self._prior, features)) for each in features]
            for i in range(3):
                sums[i] += PRIOR_WEIGHT * row[i]
                for j in range(3):
                    products[i][j] += PRIOR_WEIGHT * row[i] * row[j]
        return products, sums


def _value(coefficients: Coefficients, features: tuple[float, float, float]) -> float:
    (a0, a1, a2), (x0, x1, x2) = coefficients, features
    return a0 * x0 + a1 * x1 + a2 * x2


def _features(computed_tokens: int, cached_tokens: int) -> tuple[float, float, float]:
    u, c = computed_tokens / TOKENS, cached_tokens / TOKENS
    return 1.0, u, u * (2 * c + u)


def _solve(products: Sequence[Sequence[float]], sums: Sequence[float], free: Sequence[int]) -> list[float]:
    """The coefficients that `free` names, by elimination with pivots; the others are 0. Each is scaled by its diagonal."""
    scale = {i: products[i][i] ** -0.5 for i in free}
    rows = [[products[i][j] * scale[i] * scale[j] for j in free] + [sums[i] * scale[i]] for i in free]
    size = len(free)
    for at in range(size):
        rows[at][at] += RIDGE
    for at in range(size):
        pivot = max(range(at, size), key=lambda i: abs(rows[i][at]))
        rows[at], rows[pivot] = rows[pivot], rows[at]
        for i in range(at + 1, size):
            factor = rows[i][at] / rows[at][at]
            rows[i] = [a - factor * b for a, b in zip(rows[i], rows[at], strict=True)]
    found = [0.0, 0.0, 0.0]
    for at in reversed(range(size)):
        known = sum(rows[at][j] * found[free[j]] for j in range(at + 1, size))
        found[free[at]] = (rows[at][size] - known) / rows[at][at]
    return [each * scale.get(i, 0.0) for i, each in enumerate(found)]


class MoveEstimate:
    """What moving a prefix inside a cluster takes: some calls, and its bytes at some rate. Least squares that forget."""

    def __init__(self, bytes_per_s: float, calls_s: float = CALLS_S) -> None:
        """The prior, until moves have shown what they take."""
        self.calls_s = calls_s
        self.bytes_per_s = bytes_per_s
        self._prior = calls_s, bytes_per_s
        # Sums over the moves seen: w, w·x, w·x², w·y, w·x·y of x bytes in y seconds.
        self._sums = [0.0] * 5
        for num_bytes in (0.0, bytes_per_s):
            self._add(num_bytes, calls_s + num_bytes / bytes_per_s)
        # Moves of one size leave the equations open, and noise would answer them: the prior never fades altogether.
        self._least = [PRIOR_WEIGHT * each for each in self._sums]

    def observe(self, num_bytes: float, seconds: float) -> None:
        """`num_bytes` have moved within `seconds`, calls and all."""
        if num_bytes <= 0 or seconds < LEAST_S:
            return
        self._sums = [each * (1.0 - 1.0 / MOVES_REMEMBERED) for each in self._sums]
        self._add(num_bytes, seconds)
        w, wx, wxx, wy, wxy = (each + least for each, least in zip(self._sums, self._least, strict=True))
        slope = (w * wxy - wx * wy) / max(w * wxx - wx * wx, LEAST_S)
        slope = min(max(slope, 0.0), wy / wx)  # neither calls nor bytes take less than no time
        self.calls_s = (wy - slope * wx) / w
        self.bytes_per_s = 1.0 / max(slope, LEAST_SLOPE)

    def seconds(self, num_bytes: float) -> float:
        return self.calls_s + num_bytes / self.bytes_per_s

    def _add(self, num_bytes: float, seconds: float) -> None:
        # Errors count relatively to what was expected, not to what was seen: else slow moves would hardly count.
        calls_s, bytes_per_s = self._prior
        w, x = (calls_s + num_bytes / bytes_per_s) ** -2, num_bytes
        for i, each in enumerate((w, w * x, w * x * x, w * seconds, w * x * seconds)):
            self._sums[i] += each


class MoveDelays:
    """What to add to an estimate between two nodes whose moves fail or are late: more each time, less as time goes by.

    It is kept apart from what moves that arrive say: one pair of nodes in trouble says nothing of the others.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], _Delay] = {}  # by (source, target)

    def __len__(self) -> int:
        return len(self._known)

    def failed(self, source: str, target: str, expected_s: float, seconds: float, now: float) -> None:
        """A move that its bytes said would take `expected_s` was given up `now`, after `seconds`.

        The next one is taken to be twice as long as this one was or was expected to be, so that sooner or later computing
        wins. Moves that began before it was last doubled tell of the same trouble: they do not double it again.
        """
        known = self._known.get((source, target), _NO_DELAY)
        delay_s, doubled_at = known.at(now), known.doubled_at
        if now - seconds >= doubled_at:
            expected_s, doubled_at = expected_s + delay_s, now
        raised_s = max(delay_s, 2.0 * max(seconds, expected_s))
        self._known[source, target] = _Delay(min(raised_s, MOST_DELAY_S), now, doubled_at)

    def arrived(self, source: str, target: str) -> None:
        """A move between the two took what it took: nothing is to be added any more."""
        self._known.pop((source, target), None)

    def keep(self, node_ids: Collection[str]) -> None:
        """Forgets nodes that are gone."""
        self._known = {pair: delay for pair, delay in self._known.items() if set(pair) <= set(node_ids)}

    def at(self, now: float) -> dict[tuple[str, str], float]:
        """The delays in seconds by (source, target); what has faded is forgotten."""
        self._known = {pair: delay for pair, delay in self._known.items() if delay.at(now) >= LEAST_DELAY_S}
        return {pair: delay.at(now) for pair, delay in self._known.items()}


class _Delay(NamedTuple):
    seconds: float
    since: float
    doubled_at: float

    def at(self, now: float) -> float:
        return self.seconds * exp2((self.since - now) / DELAY_HALVES_S)


_NO_DELAY: Final = _Delay(0.0, 0.0, float("-inf"))


class PrefillShare:
    """The part of its time that a decode node has lately spent on prompts: what its streams had to wait for."""

    def __init__(self) -> None:
        self._share = 0.0
        self._at = 0.0

    def add(self, seconds: float, now: float) -> None:
        """A prompt of so much computing was given to it."""
        self._share, self._at = self.at(now) + seconds / PREFILL_SHARE_S, now

    def at(self, now: float) -> float:
        return self._share * exp((self._at - now) / PREFILL_SHARE_S)


class LearnedCost(PrefillCost):
    """Prefill times of every node as they have been lately; of a node that has shown little, its cluster's."""

    def __init__(self, tokens_per_s: float = 20_000.0, overhead_s: float = 0.0) -> None:
        """The prior, until anything has been seen: one rate, and what every prefill takes beside it."""
        self.assume(tokens_per_s, overhead_s)
        self._nodes: dict[str, PrefillEstimate] = {}
        self._clusters: dict[str, PrefillEstimate] = {}

    def assume(self, tokens_per_s: float, overhead_s: float = 0.0) -> None:
        """Another prior, for nodes of which nothing has been seen yet."""
        super().__init__(tokens_per_s, overhead_s)
        # A trace of the quadratic term keeps the prior's equations apart from each other.
        self._prior = (max(overhead_s, 1e-3), TOKENS / tokens_per_s, 1e-6)

    def observe(self, node_id: str, cluster: str, computed_tokens: int, cached_tokens: int, seconds: float) -> None:
        """A node has computed a prompt; `seconds` from the start of the computing to its end, no queue, no transfer."""
        for estimates, key in ((self._nodes, node_id), (self._clusters, cluster)):
            estimates.setdefault(key, PrefillEstimate(self._prior)).observe(computed_tokens, cached_tokens, seconds)

    def errors(self) -> dict[str, Error]:
        """How wrong late predictions were, by cluster."""
        return {cluster: estimate.error for cluster, estimate in self._clusters.items()}

    def forget(self, node_id: str) -> None:
        """The node is gone, or is not what it was."""
        self._nodes.pop(node_id, None)

    def estimate(self, node: NodeView) -> PrefillEstimate | None:
        """What is known about `node`; None while nothing is."""
        own = self._nodes.get(node.node_id)
        if own is not None and own.samples >= BELIEVED:
            return own
        return self._clusters.get(node.cluster, own)

    def prefill_s(self, node: NodeView, num_tokens: int, cached_tokens: int) -> float:
        known = self.estimate(node)
        if known is None:
            return super().prefill_s(node, num_tokens, cached_tokens)
        return known.seconds(num_tokens - cached_tokens, cached_tokens)

    def queue_s(self, node: NodeView) -> float:
        known = self.estimate(node)
        if node.queue_s is not None or known is None:
            return super().queue_s(node)
        return node.queued_tokens * known.seconds_per_token

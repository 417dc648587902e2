"""Learns how long prefills take on a node: least squares that forget, in bounded memory.

    seconds(u, c) = a0 + a1·u + a2·u·(2c + u)      u tokens computed behind c cached ones

which is T(c + u) − T(c) + T(0) of a quadratic T, as the profiles have it: every token costs the layers, and attends to all
before it. Old samples fade, so that a node which has become slower is believed after a few hundred prompts.
"""

from collections import deque
from collections.abc import Collection, Sequence
from math import exp2, inf
from typing import Final, NamedTuple

from planner.decisions.estimates.accuracy import ERRORS_KEPT, Accuracy, Error
from planner.decisions.estimates.decoding import LearnedSteps
from planner.decisions.views import NodeView, PrefillCost

MOVES_REMEMBERED: Final = 16.0
MOST_LATE: Final = 10.0  # times what was predicted is all that one move may say
CALLS_S: Final = 0.01  # of a move: Reserve, Load and Commit
DELAY_HALVES_S: Final = 60.0  # a delay: moves are tried again some minutes after they have failed
MOST_DELAY_S: Final = 600.0  # no prompt computes for longer, and a greater delay would only take longer to fade
LEAST_DELAY_S: Final = 1e-3  # decides nothing
LEAST_SLOPE: Final = 1e-13  # s per byte: no memory is copied faster than 10 TB/s
MEMORY: Final = 64.0  # prompts after which a sample's weight has fallen to 1/e
PRIOR_WEIGHT: Final = 0.005  # of a sample: enough to say what no sample has, not enough to argue with one
PROBES: Final = (
    (500, 0),
    (8_000, 0),
    (32_000, 0),
    (2_000, 64_000),
)  # (computed, cached) at which the prior has its say
ANSWERS_REMEMBERED: Final = 256
TYPICAL_ANSWER_TOKENS: Final = 256.0  # until one has been seen
FRESH_S: Final = 60.0  # what was learned is believed for so long without another sample
TRUST_HALVES_S: Final = 60.0
BELIEVED: Final = 8  # samples from which on a node's own estimate is better than its cluster's
LEAST_S: Final = 1e-6  # what took less was not measured, and would outweigh all that was
FORGOTTEN_S: Final = 1e-9  # what was seen counts for less than one sample of any time at all
RIDGE: Final = (
    1e-12  # of a diagonal: more than rounding takes from it, so that equations that nearly agree can be solved
)
TOKENS: Final = 1000.0  # features in thousands of tokens: the normal equations are well conditioned

FADE: Final = 1.0 - 1.0 / MEMORY

Coefficients = tuple[float, float, float]
# A symmetric matrix of three rows, and where its entries are in it.
Products = tuple[float, float, float, float, float, float]
_Equations = tuple[Products, Coefficients, float, float]  # with the seconds seen, and those that the prior expected
# What was believed, or the equations to solve for it; tokens computed and cached, and the seconds that they took.
_Sample = tuple[Coefficients | _Equations, int, int, float]
AT: Final = {(0, 0): 0, (0, 1): 1, (0, 2): 2, (1, 1): 3, (1, 2): 4, (2, 2): 5}


class PrefillEstimate:
    """One node's curve, or one cluster's."""

    def __init__(self, prior: Coefficients, *, is_judged: bool = True) -> None:
        """`prior`: (s, s per 1000 tokens, s per (1000 tokens)²), believed until samples say otherwise.

        Without `is_judged` it keeps no record of its errors.
        """
        self.samples = 0
        self._prior = prior
        self._products: Products = (0.0,) * 6
        self._sums: Coefficients = (0.0,) * 3
        self._seconds = self._expected_s = self._tokens = 0.0
        self._known: Coefficients | None = prior
        self._accuracy = Accuracy()
        self._unjudged: deque[_Sample] | None = deque(maxlen=ERRORS_KEPT) if is_judged else None
        self._prior_products, self._prior_sums = _shape_of(prior)

    def observe(self, computed_tokens: int, cached_tokens: int, seconds: float) -> None:
        """A prefill took `seconds` from its start to its end. What took next to no time is no sample."""
        if computed_tokens <= 0 or seconds < LEAST_S:
            return
        if self._unjudged is not None:
            # Judged when errors are asked for: few samples ever are, and equations are not solved for the others.
            believed = self._known or (self._products, self._sums, self._seconds, self._expected_s)
            self._unjudged.append((believed, computed_tokens, cached_tokens, seconds))
        u, c = computed_tokens / TOKENS, cached_tokens / TOKENS
        q = u * (2 * c + u)
        # Over the seconds seen: what counts is the relative error, for short prompts as much as for long ones.
        x, y, z = 1.0 / seconds, u / seconds, q / seconds
        xx, xy, xz, yy, yz, zz = self._products
        self._products = (
            xx * FADE + x * x, xy * FADE + x * y, xz * FADE + x * z, yy * FADE + y * y, yz * FADE + y * z,
            zz * FADE + z * z,
        )  # fmt: skip
        sx, sy, sz = self._sums
        self._sums = (sx * FADE + x, sy * FADE + y, sz * FADE + z)
        self._seconds = self._seconds * FADE + seconds
        a0, a1, a2 = self._prior
        self._expected_s = self._expected_s * FADE + (a0 + a1 * u + a2 * q)
        self._tokens = self._tokens * FADE + computed_tokens
        self.samples += 1
        self._known = None

    def fade(self, share: float) -> None:
        """Only so much of what was seen still counts: the next sample counts for more."""
        if share * self._seconds < FORGOTTEN_S:
            share = 0.0
        p0, p1, p2, p3, p4, p5 = self._products
        self._products = (share * p0, share * p1, share * p2, share * p3, share * p4, share * p5)
        s0, s1, s2 = self._sums
        self._sums = (share * s0, share * s1, share * s2)
        self._seconds, self._expected_s = share * self._seconds, share * self._expected_s
        self._tokens *= share
        self._known = None

    def seconds(self, computed_tokens: int, cached_tokens: int) -> float:
        """Predicted time to compute `computed_tokens` behind `cached_tokens`."""
        return _seconds(self._known or self.coefficients, computed_tokens, cached_tokens)

    @property
    def seconds_per_token(self) -> float:
        """What a computed token took on average, whatever the prompts were: for queues of unknown lengths."""
        if self._tokens:
            return self._seconds / self._tokens
        return self._prior[1] / TOKENS

    @property
    def error(self) -> Error:
        """Of recent predictions. Only samples that are new since the last time are judged: a read costs little."""
        while self._unjudged:
            believed, computed_tokens, cached_tokens, seconds = self._unjudged.popleft()
            known = self._solved(believed) if len(believed) == 4 else believed
            self._accuracy.note(_seconds(known, computed_tokens, cached_tokens), seconds)
        return self._accuracy.error

    @property
    def coefficients(self) -> Coefficients:
        """(s, s per 1000 tokens, s per (1000 tokens)²); none is negative: more tokens never take less time."""
        if self._known is None:
            self._known = self._solved((self._products, self._sums, self._seconds, self._expected_s))
        return self._known

    def _solved(self, equations: _Equations) -> Coefficients:
        products, sums = self._with_prior(*equations)
        found = _solve_all(products, sums)
        if (least := min(found)) >= 0:
            return found
        free = [0, 1, 2]
        while least < 0:
            free.remove(found.index(least))
            found = _solve(products, sums, free)
            least = min(found)
        return found

    def _with_prior(
        self, products: Products, sums: Coefficients, seconds: float, expected_s: float
    ) -> tuple[Products, Coefficients]:
        """The equations, and in them the prior's shape at the height of what was seen: the first sample leaves them open."""
        once = PRIOR_WEIGHT * (expected_s / seconds if expected_s else 1.0)
        twice = once * once / PRIOR_WEIGHT
        (xx, xy, xz, yy, yz, zz), (a, b, c, d, e, f) = products, self._prior_products
        (sx, sy, sz), (x, y, z) = sums, self._prior_sums
        return (
            (xx + twice * a, xy + twice * b, xz + twice * c, yy + twice * d, yz + twice * e, zz + twice * f),
            (sx + once * x, sy + once * y, sz + once * z),
        )


def _seconds(coefficients: Coefficients, computed_tokens: int, cached_tokens: int) -> float:
    a0, a1, a2 = coefficients
    u, c = (computed_tokens if computed_tokens > 0 else 0) / TOKENS, cached_tokens / TOKENS
    return a0 + u * (a1 + a2 * (2 * c + u))


def _shape_of(prior: Coefficients) -> tuple[Products, Coefficients]:
    """The equations that the prior's own times at the PROBES make."""
    rows = []
    for computed, cached in PROBES:
        features = _features(computed, cached)
        rows.append([each / _value(prior, features) for each in features])
    xx, xy, xz, yy, yz, zz = [sum(row[i] * row[j] for row in rows) for i in range(3) for j in range(i, 3)]
    x, y, z = [sum(row[i] for row in rows) for i in range(3)]
    return (xx, xy, xz, yy, yz, zz), (x, y, z)


def _value(coefficients: Coefficients, features: tuple[float, float, float]) -> float:
    (a0, a1, a2), (x0, x1, x2) = coefficients, features
    return a0 * x0 + a1 * x1 + a2 * x2


def _features(computed_tokens: int, cached_tokens: int) -> tuple[float, float, float]:
    u, c = computed_tokens / TOKENS, cached_tokens / TOKENS
    return 1.0, u, u * (2 * c + u)


def _solve_all(products: Products, sums: Coefficients) -> Coefficients:
    """All three coefficients, by LDLᵀ; each is scaled by its diagonal."""
    xx, xy, xz, yy, yz, zz = products
    a, b, c = xx**-0.5, yy**-0.5, zz**-0.5
    first = 1.0 + RIDGE
    xy, xz, yz = xy * a * b, xz * a * c, yz * b * c
    second = first - xy * xy / first
    between = yz - xy * xz / first
    third = first - xz * xz / first - between * between / second
    x = sums[0] * a
    y = sums[1] * b - xy * x / first
    z = (sums[2] * c - xz * x / first - between * y / second) / third
    y = (y - between * z) / second
    x = (x - xy * y - xz * z) / first
    return x * a, y * b, z * c


def _solve(products: Products, sums: Coefficients, free: Sequence[int]) -> Coefficients:
    """One or two coefficients, those that `free` names, where the others are 0."""
    found = [0.0, 0.0, 0.0]
    if len(free) == 1:
        (i,) = free
        found[i] = sums[i] / products[AT[i, i]]
    elif free:
        i, j = free
        ii, ij, jj = products[AT[i, i]], products[AT[i, j]], products[AT[j, j]]
        determinant = ii * jj * (1.0 + RIDGE) - ij * ij
        found[i] = (sums[i] * jj - sums[j] * ij) / determinant
        found[j] = (sums[j] * ii - sums[i] * ij) / determinant
    x, y, z = found
    return x, y, z


class MoveEstimate:
    """The time to move a prefix inside a cluster: some calls, and its bytes at some rate. Least squares that forget."""

    def __init__(self, bytes_per_s: float, calls_s: float = CALLS_S) -> None:
        """The prior, until moves have shown what they take."""
        self.calls_s = calls_s
        self.bytes_per_s = bytes_per_s
        self.lateness = 0.0  # by how much longer late moves took than was predicted, as a share; the mean
        self._accuracy = Accuracy()
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
        self._accuracy.note(self.seconds(num_bytes), seconds)
        late = max(0.0, seconds / self.seconds(num_bytes) - 1.0)
        self.lateness += (min(late, MOST_LATE) - self.lateness) / MOVES_REMEMBERED
        self._sums = [each * (1.0 - 1.0 / MOVES_REMEMBERED) for each in self._sums]
        self._add(num_bytes, seconds)
        w, wx, wxx, wy, wxy = (each + least for each, least in zip(self._sums, self._least, strict=True))
        slope = (w * wxy - wx * wy) / max(w * wxx - wx * wx, LEAST_S)
        slope = min(max(slope, 0.0), wy / wx)  # neither calls nor bytes take less than no time
        self.calls_s = max(0.0, wy - slope * wx) / w  # rounding may leave a little less than nothing
        self.bytes_per_s = 1.0 / max(slope, LEAST_SLOPE)

    @property
    def error(self) -> Error:
        return self._accuracy.error

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

        The next move is assumed to take twice as long as this one took or was expected to take. So sooner or later
        computing wins. Moves that began before it was last doubled tell of the same trouble: they do not double it
        again.
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


_NO_LINE: Final = (0.0, 0.0)
_NO_DELAY: Final = _Delay(0.0, 0.0, float("-inf"))


class AnswerEstimate:
    """Predicts an answer's length: the mean of recent ones, at most what its request allows."""

    def __init__(self) -> None:
        self._mean = TYPICAL_ANSWER_TOKENS
        self._samples = 0
        self._accuracy = Accuracy()

    def tokens(self, limit: float | None = None) -> float:
        """Predicted tokens of an answer that may have `limit`."""
        return self._mean if limit is None else min(self._mean, limit)

    def observe(self, tokens: float, limit: float | None = None) -> None:
        """An answer that was allowed `limit` tokens had `tokens`."""
        self._accuracy.note(self.tokens(limit), tokens)
        self._samples += 1
        self._mean += (tokens - self._mean) / min(self._samples, ANSWERS_REMEMBERED)

    @property
    def error(self) -> Error:
        return self._accuracy.error


class Curve(NamedTuple):
    """What is believed of a node, as few numbers as a prediction needs: tens of nodes are asked for several per decision."""

    cluster: str
    a0: float
    a1: float
    a2: float
    seconds_per_token: float
    heard: float  # when it was last seen or tried, or its cluster, where that is what is believed; or later


class LearnedCost(PrefillCost):
    """Prefill times of every node as they have been lately; of a node that has shown little, its cluster's."""

    def __init__(
        self, tokens_per_s: float = 20_000.0, overhead_s: float = 0.0, steps: LearnedSteps | None = None
    ) -> None:
        """The prior, until anything has been seen: one rate, and what every prefill takes beside it.

        `steps`, where anybody learns them, are the times of decode steps.
        """
        self.assume(tokens_per_s, overhead_s)
        self._steps = steps
        self._now = 0.0
        self._heard: dict[str, float] = {}  # when a node's or a cluster's prefill was last seen, or tried
        self._nodes: dict[str, PrefillEstimate] = {}
        self._clusters: dict[str, PrefillEstimate] = {}
        self._curves: dict[str, Curve] = {}  # by node, until something is learned of it
        self._leaning: dict[str, set[str]] = {}  # by cluster, those of them that are its cluster's

    def assume(self, tokens_per_s: float, overhead_s: float = 0.0) -> None:
        """Another prior, for nodes that have shown nothing yet."""
        super().__init__(tokens_per_s, overhead_s)
        # A trace of the quadratic term keeps the prior's equations apart from each other.
        self._prior = (max(overhead_s, 1e-3), TOKENS / tokens_per_s, 1e-6)

    def as_of(self, now: float) -> None:
        """The time of the questions that follow."""
        self._now = now

    def tried(self, node_id: str, cluster: str) -> None:
        """A prompt goes to that node: it will show what the node is like by now, and meanwhile no other need go there to see."""
        heard, now = self._heard, self._now
        for estimates, key in ((self._nodes, node_id), (self._clusters, cluster)):
            if now - heard.get(key, now) > FRESH_S and (known := estimates.get(key)) is not None:
                known.fade(self._trust(key))
                self._learned(node_id, cluster)
            heard[key] = now

    def _trust(self, key: str) -> float:
        """How much what was learned of a node or a cluster still says: all of it for some time, then less and less."""
        return _trust_after(self._now - self._heard.get(key, self._now))

    def observe(self, node_id: str, cluster: str, computed_tokens: int, cached_tokens: int, seconds: float) -> None:
        """A node has computed a prompt; `seconds` from the start of the computing to its end, no queue, no transfer."""
        for estimates, key in ((self._nodes, node_id), (self._clusters, cluster)):
            self._heard[key] = self._now
            if (known := estimates.get(key)) is None:
                known = estimates[key] = PrefillEstimate(self._prior, is_judged=estimates is self._clusters)
            known.observe(computed_tokens, cached_tokens, seconds)
        self._learned(node_id, cluster)

    def errors(self) -> dict[str, Error]:
        """The errors of recent predictions, by cluster."""
        return {cluster: estimate.error for cluster, estimate in self._clusters.items()}

    def forget(self, node_id: str) -> None:
        """The node is gone, or is not what it was."""
        self._nodes.pop(node_id, None)
        self._heard.pop(node_id, None)
        self._curves.pop(node_id, None)

    def _learned(self, node_id: str, cluster: str) -> None:
        self._curves.pop(node_id, None)
        for name in self._leaning.pop(cluster, ()):
            self._curves.pop(name, None)

    def estimate(self, node: NodeView) -> PrefillEstimate | None:
        """What is known about `node`; None while nothing is."""
        own = self._nodes.get(node.node_id)
        is_believed = own is not None and own.samples >= BELIEVED
        return own if is_believed else self._clusters.get(node.cluster, own)

    def curve(self, node: NodeView) -> Curve | None:
        """The same in numbers."""
        known = self._curves.get(node.node_id)
        if known is None or known.cluster != node.cluster:
            known = self._look_up(node)
        return known

    def _look_up(self, node: NodeView) -> Curve | None:
        if (known := self.estimate(node)) is None:
            return None
        key = node.node_id
        if self._nodes.get(node.node_id) is not known:
            key = node.cluster
            self._leaning.setdefault(key, set()).add(node.node_id)
        heard = self._heard.get(key, inf)
        curve = Curve(node.cluster, *known.coefficients, known.seconds_per_token, heard)
        self._curves[node.node_id] = curve
        return curve

    def prefill_s(self, node: NodeView, num_tokens: int, cached_tokens: int) -> float:
        curve = self._curves.get(node.node_id)
        if curve is None or curve.cluster != node.cluster:
            curve = self._look_up(node)
        if curve is None:
            return super().prefill_s(node, num_tokens, cached_tokens)
        _, a0, a1, a2, _, heard = curve
        computed = num_tokens - cached_tokens
        u, c = (computed if computed > 0 else 0) / TOKENS, cached_tokens / TOKENS
        seconds = a0 + u * (a1 + a2 * (2 * c + u))
        return seconds if self._now - heard <= FRESH_S else self._hoped_s(node, num_tokens, cached_tokens, seconds)

    def _hoped_s(self, node: NodeView, num_tokens: int, cached_tokens: int, seconds: float) -> float:
        """A slow estimate that has not been refreshed is trusted less, so the node is tried again eventually."""
        curve = self._look_up(node)  # it may have been tried since
        assert curve is not None
        trust = _trust_after(self._now - curve.heard)
        if trust == 1:
            return seconds
        hoped_s = super().prefill_s(node, num_tokens, cached_tokens)
        return min(seconds, trust * seconds + (1.0 - trust) * hoped_s)

    def step_s(self, node: NodeView, running: int) -> float:
        learned = self._steps.step_s(node.node_id, running) if self._steps is not None else 0.0
        return learned or super().step_s(node, running)  # what streams saw has prompts and the network in it

    def steps_s(self, nodes: Sequence[NodeView]) -> list[float]:
        if self._steps is None:
            return super().steps_s(nodes)
        lines, found = self._steps.lines, list[float]()
        for node in nodes:
            constant, slope = lines.get(node.node_id, _NO_LINE)
            running = node.running + node.waiting + 1
            found.append(constant + slope * running or super().step_s(node, running))
        return found

    def queue_s(self, node: NodeView) -> float:
        if node.queue_s is not None or (curve := self.curve(node)) is None:
            return super().queue_s(node)
        return node.queued_tokens * curve.seconds_per_token


def _trust_after(age_s: float) -> float:
    return 1.0 if age_s <= FRESH_S else exp2((FRESH_S - age_s) / TRUST_HALVES_S)

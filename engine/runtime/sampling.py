"""Chooses tokens from logits, one request at a time, in NumPy.

Chance is a function of (seed, position in the sequence), not of how many numbers have been drawn: a request continued
on another node with prompt + tokens so far goes on exactly as it would have.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.agent.base import Logits
from engine.errors import EngineError

MAX_TOP_LOGPROBS: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """A client's sampling parameters: fields as in OpenAI's API; `top_k`, `min_tokens` and `ignore_eos` as in
    vLLM's."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int | None = None  # None: no logprobs at all; 0: of the chosen token only


class TokenLogprob(NamedTuple):
    token: int
    logprob: float


class SampledToken(NamedTuple):
    """A chosen token. `logprob` and `top` are of the model's own distribution, before temperature and penalties."""

    token: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


class Sampler:
    """The sampling state of one request: what has been generated so far."""

    def __init__(self, params: SamplingParams, end_tokens: Sequence[int]) -> None:
        self._params = params
        self._end_tokens = list(end_tokens)
        self._counts: Counter[int] = Counter()
        self._generated = 0

    def sample(self, logits: Logits, position: int) -> SampledToken:
        """Chooses the token at `position` (0 = first token of the prompt) from logits [vocab_size]."""
        token = self._choose(self._adjusted(logits), position)
        self.note(token)
        if self._params.top_logprobs is None:
            return SampledToken(token)
        logprobs = log_softmax(logits)
        return SampledToken(token, float(logprobs[token]), _top(logprobs, self._params.top_logprobs))

    def note(self, token: int) -> None:
        """`token` has been generated, here or by an engine before."""
        self._counts[token] += 1
        self._generated += 1

    def _choose(self, logits: Logits, position: int) -> int:
        p = self._params
        if p.temperature == 0.0:
            best = int(logits.argmax())  # the first NaN, if there is one
            return _checked(best, float(logits[best]))
        probabilities = distribution(logits, temperature=p.temperature, top_k=p.top_k, top_p=p.top_p)
        chance = np.random.default_rng([p.seed, position]).random()
        cumulative = probabilities.cumsum()
        token = np.searchsorted(cumulative, chance * cumulative[-1], side="right").clip(0, len(cumulative) - 1)
        return _checked(int(token), float(cumulative[-1]))

    def _adjusted(self, logits: Logits) -> Logits:
        p = self._params
        penalised = bool(self._counts) and (p.presence_penalty or p.frequency_penalty)
        ends_barred = self._generated < p.min_tokens and self._end_tokens
        if not (penalised or ends_barred or p.logit_bias):
            return logits
        adjusted = logits.copy()
        for token, bias in p.logit_bias.items():
            adjusted[token] += bias
        if penalised:
            tokens = np.fromiter(self._counts.keys(), dtype=np.int64)
            counts = np.fromiter(self._counts.values(), dtype=np.float32)
            adjusted[tokens] -= p.presence_penalty + p.frequency_penalty * counts
        if ends_barred:
            adjusted[self._end_tokens] = -np.inf
        return adjusted


def distribution(logits: Logits, *, temperature: float, top_k: int, top_p: float) -> NDArray[np.float64]:
    """Probabilities [vocab_size] after temperature, then top-k, then nucleus sampling (Holtzman et al. 2020)."""
    scaled = logits.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # others may become -inf; NaN is refused where a token is chosen
        scaled -= scaled.max()  # first, so that the best token stays at 0 however small the temperature is
        scaled /= temperature
    if 0 < top_k < len(scaled):
        scaled[scaled < np.partition(scaled, -top_k)[-top_k]] = -np.inf
    weights = np.exp(scaled)
    weights /= weights.sum()
    if top_p < 1.0:
        order = np.argsort(-weights, kind="stable")
        # The smallest set whose mass reaches top_p: what lies before the token that reaches it, and that token.
        before = weights[order].cumsum() - weights[order]
        weights[order[before >= top_p]] = 0.0
        weights /= weights.sum()
    return np.asarray(weights)


def _checked(token: int, weight: float) -> int:
    """`token`, unless what it was chosen by is no number: any token would be a wrong one."""
    if not isfinite(weight):
        raise EngineError(f"the model gave logits of {weight}: no token can be chosen")
    return token


def log_softmax(logits: Logits) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()), dtype=np.float64)


def _top(logprobs: NDArray[np.float64], count: int) -> tuple[TokenLogprob, ...]:
    if count == 0:
        return ()
    count = min(count, len(logprobs))
    candidates = np.argpartition(-logprobs, count - 1)[:count]
    best = candidates[np.argsort(-logprobs[candidates], kind="stable")]
    return tuple(TokenLogprob(int(token), float(logprobs[token])) for token in best)

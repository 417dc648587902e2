"""KVCache that is on its way to a decode node: a prompt with the same beginning waits for it, and has only the rest sent.

    prompts      A ─────────────► decided first: all of it is sent
                 A b              waits until A has landed, then b is sent, and the states
    decode node  [ A ][ b ]

Several answers to one prompt, and agents that fan out, are decided before the first of them has landed. The attention of a
prefix serves every prompt that begins with it, wherever they part; states and windows are sent for each. A prompt waits only
for prompts that were decided before it: no two wait for each other.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

import msgspec

from planner.decisions.views import LinkView, NodeView, RouteRequest

LEAST_SHARE: Final = 0.1  # of the tokens that the decode node lacks: less is not worth a wait
PATIENCE: Final = 1.25  # a prompt may arrive this much later than without the wait,
GRACE_S: Final = 0.1  # and by this: saved bytes leave the link to all other prompts


class Arriving(Protocol):
    """A prompt whose KVCache is on its way; `hashes` are those of its full blocks."""

    @property
    def hashes(self) -> Sequence[Hashable]: ...


Prompt = TypeVar("Prompt", bound=Arriving)


@dataclass(frozen=True, slots=True)
class SharedPrefix(Generic[Prompt]):
    """The first `blocks` of a prompt are those of `first`, too."""

    first: Prompt
    blocks: int


class Arrivals(Generic[Prompt]):
    """The prompts whose KVCache is on its way to one decode node, in the order in which that was decided."""

    def __init__(self) -> None:
        self._by_first_block: dict[Hashable, list[Prompt]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_first_block.values()))

    def __bool__(self) -> bool:
        return bool(self._by_first_block)

    def add(self, prompt: Prompt) -> None:
        """It has been decided to send this prompt, which has a full block."""
        self._by_first_block.setdefault(prompt.hashes[0], []).append(prompt)

    def remove(self, prompt: Prompt) -> None:
        """It has landed, or will not."""
        left = self._by_first_block[prompt.hashes[0]]
        left.remove(prompt)
        if not left:
            del self._by_first_block[prompt.hashes[0]]

    def longest(
        self, hashes: Sequence[Hashable], held: int, before: Prompt | None = None
    ) -> SharedPrefix[Prompt] | None:
        """The prompt that has most in common with these blocks, more than the `held` ones; of several the first.

        Only prompts that were decided `before` one of these are looked at.
        """
        found: SharedPrefix[Prompt] | None = None
        if len(hashes) <= held:
            return None
        for prompt in self._by_first_block.get(hashes[0], ()):
            if prompt is before:
                break
            # Most have no more than the best so far, or part where all do: one hash tells.
            if len(prompt.hashes) > held and prompt.hashes[held] == hashes[held]:
                held = common_blocks(prompt.hashes, hashes)
                found = SharedPrefix(prompt, held)
                if held == len(hashes):
                    break
        return found


def common_blocks(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """The number of blocks that two prompts share: a block's hash stands for all blocks before it."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


class ArrivalEstimate(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How a prompt's KVCache gets to its decode node; the names are those of `Route`."""

    ttft_s: float
    link_bytes: float = 0.0
    link_s: float = 0.0
    coded_bytes: float = 0.0
    shared_tokens: int = 0
    shared_s: float = 0.0

    @property
    def arrives_s(self) -> float:
        return max(self.ttft_s, self.link_s)


def sending_of(
    request: RouteRequest, decode: NodeView, link: LinkView | None, ttft_s: float, compute_s: float
) -> ArrivalEstimate:
    """All at once, or after what is on its way to the same node has landed; `link` is the one to cross, if there is one."""
    alone = _sent(request, decode.attention_tokens, link, ttft_s)
    saved_tokens = decode.landing_tokens - decode.attention_tokens
    if saved_tokens <= 0 or saved_tokens < LEAST_SHARE * (request.num_tokens - decode.attention_tokens):
        return alone
    rest = _sent(request, decode.landing_tokens, link, ttft_s)
    rate = link.rate_bytes_per_s if link is not None else None
    link_s = max(rest.link_s, decode.landing_s + rest.link_bytes / rate) if rate else rest.link_s
    shared = msgspec.structs.replace(
        rest,
        ttft_s=max(ttft_s, decode.landing_s + compute_s),
        link_s=link_s,
        shared_tokens=decode.landing_tokens,
        shared_s=decode.landing_s,
    )
    return shared if shared.arrives_s <= PATIENCE * alone.arrives_s + GRACE_S else alone


def _sent(request: RouteRequest, held_tokens: int, link: LinkView | None, ttft_s: float) -> ArrivalEstimate:
    link_bytes = _bytes_beyond(request, held_tokens) if link is not None else 0.0
    if link is None or not link_bytes:
        return ArrivalEstimate(ttft_s=ttft_s)
    return ArrivalEstimate(
        ttft_s=ttft_s,
        link_bytes=link_bytes,
        link_s=link.arrives_s(link_bytes),
        coded_bytes=link.coded_bytes(link_bytes),
    )


def bytes_to_send(request: RouteRequest, decode: NodeView) -> float:
    """KVCache that the decode node lacks and is not about to have."""
    return _bytes_beyond(request, decode.due_tokens)


def _bytes_beyond(request: RouteRequest, held_tokens: int) -> float:
    """Parts of fixed size (states, windows) are always sent."""
    if request.kv_bytes is None:
        return 0.0
    held = request.kv_bytes(held_tokens) - request.kv_bytes(0) if held_tokens else 0.0
    return request.kv_bytes(request.num_tokens) - held

"""The prefix cache of a simulated node that never evicts: the same hits as `NodeCache`, without pages, locks and a policy.

Nothing ever leaves, so what is cached is a set of hashes for each group. It grows as requests commit what they have reserved.
"""

from collections.abc import Hashable, Sequence
from typing import Final, NamedTuple

from hybrid_cache.cache.lookup import PrefixHit, longest_common_hit
from hybrid_cache.cache.snapshots import BranchPoints, Prefill
from hybrid_cache.layout.layout import ModelLayout

SNAPSHOTS: Final = BranchPoints()  # as nodes have it


class _Prompt(NamedTuple):
    """What a request will leave: its full blocks, and its states and windows after so many tokens."""

    hashes: Sequence[Hashable]
    num_tokens: int
    lengths: frozenset[int] | set[int]


class EndlessCache:
    """Prefixes of one node, all of them for ever; the methods are those of `NodeCache`."""

    def __init__(self, layout: ModelLayout) -> None:
        self.layout = layout
        self._blocks: set[Hashable] = set()
        self._held = tuple(
            self._blocks if group in layout.full_groups else set[Hashable]() for group in range(len(layout.groups))
        )
        self._prompts: dict[str, _Prompt] = {}

    def match(self, hashes: Sequence[Hashable], num_tokens: int) -> PrefixHit:
        """How much of a prompt's first `num_tokens` tokens is cached."""
        return longest_common_hit(self.layout, self._held, hashes, num_tokens)

    def begin(self, request_id: str, hashes: Sequence[Hashable], num_tokens: int, now: float) -> int:
        """A prefill begins; returns the cached prefix."""
        hit = self.match(hashes, num_tokens)
        lengths = {num_tokens}
        if self.layout.companion_groups:
            size = self.layout.block_size
            prefill = Prefill(
                num_tokens=num_tokens,
                cached_tokens=hit.num_tokens,
                attention_tokens=hit.attention_tokens,
                block_size=size,
            )
            lengths = {each for each in {*SNAPSHOTS.lengths(prefill), num_tokens} if each > hit.num_tokens}
        self._prompts[request_id] = _Prompt(hashes, num_tokens, lengths)
        return hit.num_tokens

    def expect(self, request_id: str, hashes: Sequence[Hashable], num_tokens: int, now: float) -> int:
        """KVCache will land; returns how much of its attention need not be sent."""
        self._prompts[request_id] = _Prompt(hashes, num_tokens, {num_tokens})
        return self.match(hashes, num_tokens).attention_tokens

    def room_tokens(self, attention_tokens: int) -> None:
        """There is always room, and no limit to say."""

    def fill(self, request_id: str, num_tokens: int, now: float) -> None:
        """The KVCache is there: its blocks may be reused."""
        prompt, layout = self._prompts.get(request_id), self.layout
        if prompt is None:
            return
        full = min(min(num_tokens, prompt.num_tokens) // layout.block_size, len(prompt.hashes))
        self._blocks.update(prompt.hashes[:full])
        if not layout.companion_groups:
            return
        for length in prompt.lengths:
            for group in layout.window_groups:
                tail = layout.window_blocks(group, length)
                self._held[group].update(prompt.hashes[tail.start : min(tail.stop, full)])
            blocks, rest = divmod(length, layout.block_size)
            if not rest and 0 < blocks <= full:
                for group in layout.state_groups:
                    self._held[group].add(prompt.hashes[blocks - 1])

    def let_go(self, request_id: str, now: float) -> None:
        """Forgets a request whose KVCache will not come."""
        self._prompts.pop(request_id, None)

    def end(self, request_id: str, num_tokens: int, now: float) -> None:
        """The prefill is done: its blocks may be reused."""
        self.fill(request_id, num_tokens, now)
        self.let_go(request_id, now)

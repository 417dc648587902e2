"""Which ranges of a transfer are computed and may leave, as an engine completes layer after layer."""

from collections.abc import Sequence

from hybrid_cache.cache.reservation import Reservation
from hybrid_cache.layout.transfers import transfer_ranges
from node.kvcache.pages import ArenaPages
from transport.control import messages as m
from transport.path.shm import ArenaSource
from transport.wire.sizes import RangeSizes


class OutgoingRanges:
    """The ranges that travel for a reservation, to a receiver that has `have_tokens` already."""

    def __init__(self, pages: ArenaPages, reservation: Reservation, have_tokens: int) -> None:
        self._layout = pages.layout
        self.num_tokens = reservation.num_tokens
        self._cached_tokens = reservation.cached_tokens
        self.ranges = transfer_ranges(pages.layout, reservation.num_tokens, have_tokens)
        self.sizes = RangeSizes(self.ranges.sizes(pages.layout))
        self.source: ArenaSource = pages.source(reservation, self.ranges)
        """Where the bytes lie, for lanes that send them and for receivers on this host that fetch them."""
        self._attention_groups = (*pages.layout.full_groups, *pages.layout.window_groups)
        self._computed: dict[tuple[int, int], int] = {}  # (group, layer index) -> blocks that are complete

    def cached(self) -> list[range]:
        """Ranges that lie in the prefix cache already."""
        cached = self._cached_tokens
        full_blocks, length = range(cached // self._layout.block_size), range(cached, cached + 1)
        return [
            ready
            for part in self.ranges.groups
            for ready in part.in_blocks(length if part.group in self._layout.state_groups else full_blocks)
        ]

    def layer_done(self, group: int, layer: int, num_tokens: int) -> list[range]:
        """Ranges of `layer` that became complete with its first `num_tokens` tokens. Raises MessageError."""
        layer_index = self._layer_index(group, layer, self._attention_groups)
        num_tokens, size = min(num_tokens, self.num_tokens), self._layout.block_size
        complete = -(-num_tokens // size) if num_tokens >= self.num_tokens else num_tokens // size
        first = self._computed.get((group, layer_index), self._cached_tokens // size)
        self._computed[group, layer_index] = max(first, complete)
        return self._moving(group, layer_index, range(first, complete))

    def state_done(self, group: int, layer: int, num_tokens: int) -> list[range]:
        """The range of `layer`'s snapshot, if it is the one that travels. Raises MessageError."""
        layer_index = self._layer_index(group, layer, self._layout.state_groups)
        return self._moving(group, layer_index, range(num_tokens, num_tokens + 1))

    def _layer_index(self, group: int, layer: int, groups: Sequence[int]) -> int:
        if group not in groups or layer not in self._layout.groups[group].layers:
            raise m.MessageError(f"layer {layer} of group {group} is not of that kind")
        return self._layout.groups[group].layers.index(layer)

    def _moving(self, group: int, layer_index: int, blocks: range) -> list[range]:
        part = self.ranges.of_group(group)
        ready = part.of_layer(layer_index, blocks) if part is not None else range(0)
        return [ready] if ready else []

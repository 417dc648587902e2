"""Which ranges of a transfer are computed and may leave, as an engine completes layer after layer."""

from collections.abc import Iterable, Sequence

from hybrid_cache.cache.reservation import Reservation
from hybrid_cache.layout.layout import RangeKey, transfer_ranges
from node.kvcache.pages import ArenaPages
from transport.control import messages as m
from transport.path.shm import ArenaSource


class OutgoingRanges:
    """The ranges that travel for a reservation, to a receiver that has `have_tokens` already."""

    def __init__(self, pages: ArenaPages, reservation: Reservation, have_tokens: int) -> None:
        self._layout = pages.layout
        self._pages = pages
        self._reservation = reservation
        self.num_tokens = reservation.num_tokens
        self.keys = transfer_ranges(pages.layout, reservation.num_tokens, have_tokens)
        self._index = {key: i for i, key in enumerate(self.keys)}
        self._attention_groups = (*pages.layout.full_groups, *pages.layout.window_groups)
        self._computed: dict[tuple[int, int], int] = {}  # (group, layer index) -> blocks that are complete

    @property
    def sizes(self) -> list[int]:
        """Bytes of each range."""
        return [self._layout.slab_bytes(key.group) for key in self.keys]

    @property
    def source(self) -> ArenaSource:
        """Where the bytes lie, for lanes that send them and for receivers on this host that fetch them."""
        return self._pages.source(lambda i: self._pages.place(self._reservation, self.keys[i]))

    def cached(self) -> list[int]:
        """Ranges that lie in the prefix cache already."""
        full_blocks = self._reservation.cached_tokens // self._layout.block_size
        ready = []
        for i, key in enumerate(self.keys):
            is_state = key.group in self._layout.state_groups
            if (key.block == self._reservation.cached_tokens) if is_state else (key.block < full_blocks):
                ready.append(i)
        return ready

    def layer_done(self, group: int, layer: int, num_tokens: int) -> list[int]:
        """Ranges of `layer` that became complete with its first `num_tokens` tokens. Raises MessageError."""
        layer_index = self._layer_index(group, layer, self._attention_groups)
        num_tokens, size = min(num_tokens, self.num_tokens), self._layout.block_size
        complete = -(-num_tokens // size) if num_tokens >= self.num_tokens else num_tokens // size
        first = self._computed.get((group, layer_index), self._reservation.cached_tokens // size)
        self._computed[group, layer_index] = max(first, complete)
        return self._present(RangeKey(group, layer_index, block) for block in range(first, complete))

    def state_done(self, group: int, layer: int, num_tokens: int) -> list[int]:
        """The range of `layer`'s snapshot, if it is the one that travels. Raises MessageError."""
        layer_index = self._layer_index(group, layer, self._layout.state_groups)
        return self._present([RangeKey(group, layer_index, num_tokens)])

    def _layer_index(self, group: int, layer: int, groups: Sequence[int]) -> int:
        if group not in groups or layer not in self._layout.groups[group].layers:
            raise m.MessageError(f"layer {layer} of group {group} is not of that kind")
        return self._layout.groups[group].layers.index(layer)

    def _present(self, keys: Iterable[RangeKey]) -> list[int]:
        return [self._index[key] for key in keys if key in self._index]

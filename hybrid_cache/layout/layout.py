"""The layout of a model's KVCache: groups of equal layers over one shared pool of pages.

A block of a group is the slabs of its layers in order. It is cut over `pages_per_block` pages, which may lie anywhere:

    block     | layer 0: K of block_size tokens, then V | layer 1: K, V | ... | waste |
    pages     | page a      | page b      | page c      | page d      | page e      |

A snapshot of a linear state is a block as well, with one slab of `bytes_per_snapshot` per layer. The page
size is chosen so that every group fills its last page as well as it can; what stays unused is reported as waste.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

from hybrid_cache.errors import LayoutError
from hybrid_cache.layout.spec import FullAttention, KVCacheSpec, LinearState, SlidingWindow

PAGE_ALIGN_BYTES: Final = 256
MAX_PAGES_PER_BLOCK: Final = 512
WASTE_SLACK: Final = 0.01  # larger pages are worth this much more waste than the least possible
UNBOUNDED_TOKENS: Final = 1 << 40  # of a model whose KVCache does not grow with the prompt

_KINDS: Final[dict[str, type[KVCacheSpec]]] = {
    "full_attention": FullAttention,
    "sliding_window": SlidingWindow,
    "linear_state": LinearState,
}


class ByteRange(NamedTuple):
    """Half-open byte range [start, start + length) of the arena."""

    start: int
    length: int


class Elements(NamedTuple):
    """Consecutive bytes of a slab that hold values of `dtype` in vectors (heads) of `vector`; "" and 0: not known."""

    num_bytes: int
    dtype: str
    vector: int


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers of equal spec, managed together. A layer may be in two groups (a window and a state, say)."""

    spec: KVCacheSpec
    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.layers:
            raise LayoutError("a KV cache group needs at least one layer")


@dataclass(frozen=True)
class ModelLayout:
    """The KVCache of one model: what each layer stores, cut into blocks of `block_size` tokens and into pages."""

    model: str
    dtype: str
    block_size: int
    groups: tuple[KVCacheGroup, ...]

    def __post_init__(self) -> None:
        if self.block_size <= 0:
            raise LayoutError(f"block_size must be positive, not {self.block_size}")
        if not self.groups:
            raise LayoutError("a layout needs at least one KV cache group")

    # Identity

    def to_json(self) -> str:
        """A canonical form: equal layouts have equal text."""
        kinds = {spec: name for name, spec in _KINDS.items()}
        groups = [{"kind": kinds[type(g.spec)], "layers": list(g.layers), **asdict(g.spec)} for g in self.groups]
        table = {"model": self.model, "dtype": self.dtype, "block_size": self.block_size, "groups": groups}
        return json.dumps(table, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "ModelLayout":
        """Inverse of `to_json`. Raises LayoutError."""
        try:
            table = json.loads(text)
            groups = tuple(_group_from(entry) for entry in table.pop("groups"))
            return cls(groups=groups, **table)
        except (ValueError, TypeError, KeyError, AttributeError) as exc:
            raise LayoutError(f"not a layout: {exc!r}") from exc

    @cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 of model identity and all sizes; KVCache moves only between equal fingerprints."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    # Sizes

    def slab_bytes(self, group: int) -> int:
        """Bytes of one layer of one block (or snapshot) of `group`."""
        match self.groups[group].spec:
            case LinearState(bytes_per_snapshot=size):
                return size
            case FullAttention(bytes_per_token=size) | SlidingWindow(bytes_per_token=size):
                return size * self.block_size

    def elements(self, group: int) -> tuple[Elements, ...]:
        """The elements of a slab of `group`, in order."""
        match self.groups[group].spec:
            case LinearState(bytes_per_snapshot=size, parts=parts):
                return tuple(Elements(*part) for part in parts) or (Elements(size, "", 0),)
            case FullAttention() | SlidingWindow() as spec:
                k_bytes = spec.k_bytes_per_token * self.block_size
                v_bytes = spec.bytes_per_token * self.block_size - k_bytes
                k, v = Elements(k_bytes, self.dtype, spec.k_vector), Elements(v_bytes, self.dtype, spec.v_vector)
                return (k, v) if v_bytes else (k,)

    def block_bytes(self, group: int) -> int:
        """Bytes of one block (or snapshot) of all layers of `group`, waste not included."""
        return self.slab_bytes(group) * len(self.groups[group].layers)

    @cached_property
    def page_bytes(self) -> int:
        """The page size all groups share."""
        return derive_page_bytes([self.block_bytes(g) for g in range(len(self.groups))])

    def pages_per_block(self, group: int) -> int:
        return self._block_pages[group]

    @cached_property
    def _block_pages(self) -> tuple[int, ...]:
        return tuple(-(-self.block_bytes(group) // self.page_bytes) for group in range(len(self.groups)))

    def kv_bytes(self, num_tokens: int) -> int:
        """S_kv: bytes that prefill of `num_tokens` leaves behind (PrfaaS §3.1), block padding not included."""
        return sum(len(g.layers) * _layer_bytes(g.spec, num_tokens) for g in self.groups)

    def tokens_within(self, num_pages: int) -> int:
        """The longest prompt whose KVCache, its last states and windows included, fits into so many pages."""
        left = num_pages - self._tail_pages
        if left < 0:
            return 0
        block = self._full_block_pages
        return left // block * self.block_size if block else UNBOUNDED_TOKENS

    @cached_property
    def _full_block_pages(self) -> int:
        return sum(self._block_pages[group] for group in self.full_groups)

    @cached_property
    def _tail_pages(self) -> int:
        """The bytes of a long prompt beside its full attention."""
        blocks = dict.fromkeys(self.state_groups, 1)
        for group in self.window_groups:
            spec = self.groups[group].spec
            assert isinstance(spec, SlidingWindow)
            blocks[group] = -(-(spec.window - 1) // self.block_size) + 1  # its ends need not be those of blocks
        return sum(count * self._block_pages[group] for group, count in blocks.items())

    # Places

    def segments(self, group: int, layer_index: int, pages: Sequence[int]) -> tuple[ByteRange, ...]:
        """Arena ranges, in slab order, of the `layer_index`-th layer of `group` in a block stored in `pages`."""
        if not 0 <= layer_index < len(self.groups[group].layers):
            raise LayoutError(f"group {group} has no layer index {layer_index}")
        start = layer_index * self.slab_bytes(group)
        return self._part(group, start, start + self.slab_bytes(group), pages)

    def block_segments(self, group: int, pages: Sequence[int]) -> tuple[ByteRange, ...]:
        """The same of all its layers, one after the other."""
        return self._part(group, 0, self.block_bytes(group), pages)

    def _part(self, group: int, start: int, stop: int, pages: Sequence[int]) -> tuple[ByteRange, ...]:
        if len(pages) != self.pages_per_block(group):
            raise LayoutError(f"a block of group {group} has {self.pages_per_block(group)} pages, not {len(pages)}")
        return _merge(_cut(start, stop, pages, self.page_bytes))

    # Groups by kind

    @cached_property
    def full_groups(self) -> tuple[int, ...]:
        return self._groups_of(FullAttention)

    @cached_property
    def window_groups(self) -> tuple[int, ...]:
        return self._groups_of(SlidingWindow)

    @cached_property
    def state_groups(self) -> tuple[int, ...]:
        return self._groups_of(LinearState)

    @cached_property
    def companion_groups(self) -> tuple[int, ...]:
        """The groups besides full attention, whose blocks and snapshots accompany its blocks."""
        return (*self.window_groups, *self.state_groups)

    def _groups_of(self, kind: type[KVCacheSpec]) -> tuple[int, ...]:
        return tuple(i for i, group in enumerate(self.groups) if isinstance(group.spec, kind))

    def window_blocks(self, group: int, num_tokens: int) -> range:
        """Blocks of a sliding-window group that hold the `window - 1` tokens before `num_tokens`."""
        spec = self.groups[group].spec
        assert isinstance(spec, SlidingWindow)
        if spec.window == 1:
            return range(0)
        first = max(0, num_tokens - (spec.window - 1))
        return range(first // self.block_size, -(-num_tokens // self.block_size))


def derive_page_bytes(block_bytes: Sequence[int]) -> int:
    """The largest page size whose worst waste over the groups is within WASTE_SLACK of the least possible.

    Candidates divide some group's block into whole pages. Large pages mean short page lists and long contiguous copies.
    """
    candidates = {
        _round_up(-(-size // count), PAGE_ALIGN_BYTES)
        for size in block_bytes
        for count in range(1, MAX_PAGES_PER_BLOCK + 1)
    }
    allowed = [page for page in candidates if max(block_bytes) <= page * MAX_PAGES_PER_BLOCK]
    waste = {page: max(1 - size / _round_up(size, page) for size in block_bytes) for page in allowed}
    least = min(waste.values())
    return max(page for page in allowed if waste[page] <= least + WASTE_SLACK)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _layer_bytes(spec: KVCacheSpec, num_tokens: int) -> int:
    match spec:
        case FullAttention(bytes_per_token=size):
            return size * num_tokens
        case SlidingWindow(bytes_per_token=size, window=window):
            return size * min(num_tokens, window)
        case LinearState(bytes_per_snapshot=size):
            return size


def _cut(start: int, stop: int, pages: Sequence[int], page_bytes: int) -> list[ByteRange]:
    cuts = []
    while start < stop:
        index, offset = divmod(start, page_bytes)
        length = min(page_bytes - offset, stop - start)
        cuts.append(ByteRange(pages[index] * page_bytes + offset, length))
        start += length
    return cuts


def _merge(cuts: list[ByteRange]) -> tuple[ByteRange, ...]:
    merged: list[ByteRange] = []
    for cut in cuts:
        if merged and merged[-1].start + merged[-1].length == cut.start:
            merged[-1] = ByteRange(merged[-1].start, merged[-1].length + cut.length)
        else:
            merged.append(cut)
    return tuple(merged)


def _group_from(entry: dict[str, Any]) -> KVCacheGroup:
    sizes = dict(entry)
    kind, layers = sizes.pop("kind"), sizes.pop("layers")
    if "parts" in sizes:
        sizes["parts"] = tuple((int(size), str(dtype), int(vector)) for size, dtype, vector in sizes["parts"])
    return KVCacheGroup(_KINDS[kind](**sizes), tuple(layers))

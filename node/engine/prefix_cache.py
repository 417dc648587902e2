"""What an engine's own prefix cache holds, in the names that gateways look for.

vLLM tells of its blocks under hashes of its own, and SGLang does in the same words. They also tell their tokens, images and
parents, so ours can be computed; a block whose parent is unknown has no name here and is passed over. So has one of
an adapter, of a salt that no gateway gave, or of media that are not named by their content.
What is passed over, or forgotten too early, costs a lost hit; nothing here decides what an engine really reuses.

vLLM keeps layers of one kind in one group or in several. A group of ours holds a block when each of them does: of a hybrid model
a prefix is usable only where attention and states are both there. Its blocks may be smaller than ours (`node.engine.sub_blocks`).
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import msgspec

from hybrid_cache.cache.events import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent, Medium
from hybrid_cache.hashing.block_hash import MEDIUM, NAMESPACE, Inset, block_hashes, namespaced
from hybrid_cache.layout.layout import ModelLayout
from hybrid_cache.layout.spec import FullAttention, KVCacheSpec, LinearState, SlidingWindow
from node.engine.sub_blocks import PartialBlock, Pieces

EngineHash = int | bytes

ATTENTION_KINDS: Final = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
WINDOW_KINDS: Final = frozenset({"sliding_window", "sliding_window_mla"})
STATE_KINDS: Final = frozenset({"mamba"})


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Blocks of one of vLLM's groups. Groups that skip blocks name fewer than `token_ids` has."""

    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None  # deprecated in vLLM for the name
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    cache_salt: str | None = None  # SGLang's word for what vLLM says in `extra_keys`, of all blocks of a request


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Blocks that a group has no more."""

    block_hashes: list[EngineHash]
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """No group has any block."""


EngineEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EngineCache:
    """Translates one engine's events. `salt` is what hashes of its model's blocks start from.

    The first block of a request with a gateway's namespace has it as an extra key (vLLM's `cache_salt`).
    """

    def __init__(self, layout: ModelLayout, salt: bytes) -> None:
        self._layout = layout
        self._salt = salt
        self._names: dict[EngineHash, bytes] = {}
        self._groups = tuple(_Group() for _ in layout.groups)
        self._ours: dict[int, tuple[int, ...]] = {}  # vLLM's group → ours that hold the same
        self._pieces: dict[int, Pieces[EngineHash]] = {}  # by the size of vLLM's blocks
        self._cut: dict[int, Pieces[EngineHash]] = {}  # vLLM's group → the pieces that its blocks are

    def rename(self, salt: bytes) -> None:
        """Names what begins from now on by another salt; what is held, and what goes on from it, keeps its names."""
        self._salt = salt

    @property
    def remembered(self) -> int:
        """Names and pieces: as many as blocks that the engine holds, or a few times that."""
        return len(self._names) + sum(map(len, self._pieces.values()))

    def apply(self, events: Sequence[EngineEvent]) -> list[CacheEvent]:
        """What a batch of the engine's events means to gateways."""
        cleared: list[CacheEvent] = []
        # Names first: of a new block, the group that tells its tokens may speak last.
        for event in events:
            if isinstance(event, BlockStored):
                self._learn(event)
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    self._remove(event)
                case AllBlocksCleared():
                    cleared = self._clear_groups()
        changes = [change for number, group in enumerate(self._groups) for change in group.changes(number)]
        self._forget_names(events)
        return [*cleared, *changes]

    def clear(self) -> list[CacheEvent]:
        """Begins anew: events were lost, or the engine was."""
        self._names.clear()
        self._ours.clear()
        self._pieces.clear()
        self._cut.clear()
        return self._clear_groups()

    def snapshot(self, most_hashes: int) -> Iterator[BlocksStored]:
        """Everything that is held, by group, in parts that are read when they are asked for."""
        for number, group in enumerate(self._groups):
            names = list(group.held)  # some milliseconds for a million
            for start in range(0, len(names), most_hashes):
                some = tuple([name for name in names[start : start + most_hashes] if name in group.held])
                if some:
                    yield BlocksStored(number, some, Medium.ENGINE)

    def _learn(self, event: BlockStored) -> None:
        size = event.block_size
        told = len(event.block_hashes) * size == len(event.token_ids)
        if not (self._fits(event) and told) or (event.lora_id, event.lora_name) != (None, None):
            return
        begun = self._before(event)
        if begun is None:
            return
        if event.cache_salt is not None and not event.cache_salt.startswith(NAMESPACE):
            return
        namespace, insets, named = event.cache_salt or "", list[Inset](), len(event.block_hashes)
        is_root = event.parent_block_hash is None
        for number, keys in enumerate(event.extra_keys or ()):
            meant = _meant(keys or (), number * size, is_first=not number and (is_root or bool(namespace)))
            # Its descendants are nameless, too: their chain begins with it. Pieces of a block have no images.
            if meant is None or (meant.insets and size != self._layout.block_size):
                named = number
                break
            namespace = namespace or meant.namespace
            insets += meant.insets
        if namespace:
            begun = replace(begun, salt=namespaced(self._salt, namespace))
        hashes, tokens = event.block_hashes[:named], event.token_ids[: named * size]
        if size == self._layout.block_size:
            self._name_unnamed(hashes, tokens, begun, insets)
        else:
            self._names.update(self._pieces_of(size).learn(begun, hashes, tokens, self._names))

    def _name_unnamed(
        self,
        hashes: Sequence[EngineHash],
        tokens: Sequence[int],
        begun: PartialBlock[EngineHash],
        insets: Sequence[Inset],
    ) -> None:
        """Names blocks that have no name, run by run, each from the name before it.

        A held block keeps its name, by which it will be dropped, even if the salt has changed since.
        """
        size, before, stop = self._layout.block_size, begun.before, 0
        for is_named, run in itertools.groupby(hashes, self._names.__contains__):
            keys = list(run)
            start, stop = stop, stop + len(keys)
            if not is_named:
                here = range(start * size, stop * size)
                within = [Inset(inset.start - here.start, inset.name) for inset in insets if inset.start in here]
                names = block_hashes(tokens[here.start : here.stop], size, begun.salt, before, within)
                self._names.update(zip(keys, names, strict=True))
            before = self._names[keys[-1]]

    def _fits(self, event: BlockStored) -> bool:
        """Whether its blocks are ours, or pieces of ours. A group whose blocks are larger may tell parts of those as well."""
        ours, theirs, member = self._layout.block_size, event.block_size, event.group_idx or 0
        if theirs == ours:
            return True
        if not 0 < theirs < ours or ours % theirs or event.kv_cache_spec_kind in STATE_KINDS:
            return False
        return member not in self._ours or (member in self._cut and self._cut[member] is self._pieces.get(theirs))

    def _before(self, event: BlockStored) -> PartialBlock[EngineHash] | None:
        """What the event's first block goes on from; None for what has no name."""
        parent = event.parent_block_hash
        if parent is None:
            return PartialBlock(b"", self._salt)
        if (name := self._names.get(parent)) is not None:
            return PartialBlock(name, self._salt)
        pieces = self._pieces.get(event.block_size)
        return pieces.begun(parent) if pieces is not None else None

    def _pieces_of(self, size: int) -> Pieces[EngineHash]:
        return self._pieces.setdefault(size, Pieces(size, self._layout.block_size))

    def _store(self, event: BlockStored) -> None:
        member = event.group_idx or 0
        if not self._fits(event):
            if event.block_size in self._pieces:  # in one batch with what told otherwise
                self._pieces[event.block_size].tidy()
            return
        if member not in self._ours:
            self._admit(member, event)
        hashes: Iterable[EngineHash] = event.block_hashes
        if event.block_size == self._layout.block_size:
            self._is_whole_after_all(member)
        else:
            hashes = self._cut[member].store(member, hashes)
        names = self._named(hashes)
        for number in self._ours[member]:
            self._groups[number].store(member, names)

    def _admit(self, member: int, event: BlockStored) -> None:
        self._ours[member] = tuple(self._groups_of(event))
        if event.block_size != self._layout.block_size:
            self._cut[member] = self._pieces_of(event.block_size)
        for number in self._ours[member]:
            self._groups[number].admit(member)

    def _is_whole_after_all(self, member: int) -> None:
        """What a group told first was a part of a block."""
        if (pieces := self._cut.pop(member, None)) is not None:
            self._drop(member, pieces.leave(member))

    def _remove(self, event: BlockRemoved) -> None:
        member = event.group_idx or 0
        pieces = self._cut.get(member)
        self._drop(member, event.block_hashes if pieces is None else pieces.remove(member, event.block_hashes))

    def _drop(self, member: int, hashes: Iterable[EngineHash]) -> None:
        names = self._named(hashes)
        for number in self._ours.get(member, ()):
            self._groups[number].remove(member, names)

    def _named(self, hashes: Iterable[EngineHash]) -> list[bytes]:
        return [self._names[key] for key in hashes if key in self._names]

    def _groups_of(self, event: BlockStored) -> Iterator[int]:
        for number, group in enumerate(self._layout.groups):
            if _is_of(group.spec, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window):
                yield number

    def _clear_groups(self) -> list[CacheEvent]:
        for group in self._groups:
            group.clear()
        for pieces in self._pieces.values():
            pieces.clear()
        return [CacheCleared(Medium.ENGINE)]

    def _forget_names(self, events: Sequence[EngineEvent]) -> None:
        if any(isinstance(event, AllBlocksCleared) for event in events):
            # What a group has now, it was told of in this batch: no need to go through all that it had before.
            told = (key for event in events if isinstance(event, BlockStored) for key in event.block_hashes)
            named = {key: self._names[key] for key in told if key in self._names}
            self._names = {key: name for key, name in named.items() if any(name in group for group in self._groups)}
            for pieces in self._pieces.values():
                pieces.tidy()
        for event in events:
            if not isinstance(event, BlockRemoved):
                continue
            for key in event.block_hashes:
                name = self._names.get(key)
                if name is not None and not any(name in group for group in self._groups):
                    del self._names[key]


class _Group:
    """One group of ours: which of vLLM's groups hold each block, as bits, and which blocks all of them hold."""

    def __init__(self) -> None:
        self._members = 0
        self._holders: dict[bytes, int] = {}
        self._touched: dict[bytes, None] = {}
        self.held: dict[bytes, None] = {}

    def __contains__(self, name: bytes) -> bool:
        return name in self._holders

    def admit(self, member: int) -> None:
        """From now on a block is held only if `member` holds it, too."""
        self._members |= 1 << member
        self._touched.update(self.held)

    def store(self, member: int, names: Iterable[bytes]) -> None:
        for name in names:
            self._holders[name] = self._holders.get(name, 0) | 1 << member
            self._touched[name] = None

    def remove(self, member: int, names: Iterable[bytes]) -> None:
        for name in names:
            left = self._holders.pop(name, 0) & ~(1 << member)
            if left:
                self._holders[name] = left
            self._touched[name] = None

    def clear(self) -> None:
        self._holders.clear()
        self._touched.clear()
        self.held.clear()

    def changes(self, number: int) -> Iterator[CacheEvent]:
        """What became held and what is no longer, since the last call."""
        complete = {name: self._holders.get(name, 0) == self._members for name in self._touched}
        gone = tuple(name for name, whole in complete.items() if not whole and name in self.held)
        new = tuple(name for name, whole in complete.items() if whole and name not in self.held)
        self._touched.clear()
        for name in gone:
            del self.held[name]
        self.held.update(dict.fromkeys(new))
        if gone:
            yield BlocksRemoved(number, gone, Medium.ENGINE)
        if new:
            yield BlocksStored(number, new, Medium.ENGINE)


def _is_of(spec: KVCacheSpec, kind: str | None, window: int | None) -> bool:
    match spec:
        case FullAttention():
            return kind in ATTENTION_KINDS or kind is None
        case SlidingWindow(window=ours):
            return kind in WINDOW_KINDS and window in (None, ours)
        case LinearState():
            return kind in STATE_KINDS


class _Meant(NamedTuple):
    namespace: str
    insets: list[Inset]


def _meant(keys: Sequence[Any], start: int, *, is_first: bool) -> _Meant | None:
    """The namespace of a prompt, and what begins in a block at `start`, as its extra keys tell; None: there is more to it.

    vLLM tells of an image in every block that it reaches into; where it begins, a name of ours has it.
    """
    namespace, insets = "", []
    for key in keys:
        match key:
            case str() if is_first and not namespace and key.startswith(NAMESPACE):
                namespace = key
            case [str(name), int(place)] if name.startswith(MEDIUM):
                insets += [Inset(start + place, name)] if place >= 0 else []
            case _:
                return None
    return _Meant(namespace, insets)

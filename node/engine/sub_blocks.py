"""Maps the engine's smaller blocks to ours: a group holds ours if and only if it holds every piece.

vLLM gives layers with more bytes per token blocks of fewer tokens. One hash names a prefix in all its groups,
whatever the size of their blocks. So the last piece of a block of ours goes by the name of the whole one:

    tokens            0      16      32      48      64
    blocks of 16      │  A   │  B    │  C    │  D    │
    blocks of 32      │      B       │      D        │      ours

A node that lost a piece does not hold the block, whatever became of the others: B alone is not [0, 32).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from hybrid_cache.hashing.block_hash import block_hashes

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class PartialBlock(Generic[Key]):
    """A block of ours as far as pieces have been told: our name of the prefix before it, its first tokens, their pieces.

    `salt`: of a first block, before which nothing has a name.
    """

    before: bytes
    salt: bytes
    tokens: tuple[int, ...] = ()
    pieces: tuple[Key, ...] = ()

    def and_then(self, piece: Key, tokens: Sequence[int]) -> "PartialBlock[Key]":
        """With one piece more."""
        return PartialBlock(self.before, self.salt, (*self.tokens, *tokens), (*self.pieces, piece))


class Pieces(Generic[Key]):
    """Of an engine's groups with blocks of `size` tokens: which groups hold which, and which make up blocks of ours,
    of `whole` tokens.

    As large as what the groups hold: what none of them has is forgotten.
    """

    def __init__(self, size: int, whole: int) -> None:
        self._size = size
        self._whole = whole
        self._begun: dict[Key, PartialBlock[Key]] = {}  # by its last piece so far
        self._made_of: dict[Key, tuple[Key, ...]] = {}  # by its last piece
        self._ends_of: dict[Key, set[Key]] = {}  # of a piece: the blocks that it is a part of, by their last pieces
        self._held: dict[int, set[Key]] = {}

    def __len__(self) -> int:
        """Pieces that are remembered."""
        return len({*self._begun, *self._made_of, *self._ends_of}) + sum(map(len, self._held.values()))

    def begun(self, last: Key) -> PartialBlock[Key] | None:
        """The block that this piece is in, if others follow it."""
        return self._begun.get(last)

    def learn(
        self, begun: PartialBlock[Key], pieces: Sequence[Key], tokens: Sequence[int], names: Mapping[Key, bytes]
    ) -> Iterator[tuple[Key, bytes]]:
        """Takes in what follows: pieces, and all of their tokens. Blocks of ours that end among them, with our names.

        Those that have `names` keep them.
        """
        for index, piece in enumerate(pieces):
            begun = begun.and_then(piece, tokens[index * self._size : (index + 1) * self._size])
            if len(begun.tokens) < self._whole:
                self._begun[piece] = begun
                continue
            name = names.get(piece) or block_hashes(begun.tokens, self._whole, begun.salt, begun.before)[0]
            self._made_of[piece] = begun.pieces
            for part in begun.pieces:
                self._ends_of.setdefault(part, set()).add(piece)
            yield piece, name
            begun = PartialBlock(name, begun.salt)

    def store(self, group: int, pieces: Iterable[Key]) -> list[Key]:
        """A group has these now. Blocks of ours that it holds for that, by their last pieces."""
        held = self._held.setdefault(group, set())
        known = [piece for piece in pieces if piece in self._begun or piece in self._ends_of]
        held.update(known)
        return [end for end in self._ends(known) if held.issuperset(self._made_of[end])]

    def remove(self, group: int, pieces: Sequence[Key]) -> list[Key]:
        """A group has these no more. Blocks of ours that it cannot hold for that, by their last pieces."""
        ends = self._ends(pieces)
        self._held.get(group, set()).difference_update(pieces)
        self._forget(piece for piece in pieces if not self._is_held(piece))
        return ends

    def leave(self, group: int) -> list[Key]:
        """A group's blocks have another size after all. What it was thought to hold, by last pieces."""
        return self.remove(group, list(self._held.pop(group, ())))

    def clear(self) -> None:
        """No group holds any. What they are made of stays until `tidy`: some may be told of again."""
        self._held.clear()

    def tidy(self) -> None:
        """Forgets what is not held."""
        self._forget([piece for piece in {*self._begun, *self._ends_of} if not self._is_held(piece)])

    def _ends(self, pieces: Iterable[Key]) -> list[Key]:
        return list(dict.fromkeys(end for piece in pieces for end in self._ends_of.get(piece, ())))

    def _is_held(self, piece: Key) -> bool:
        return any(piece in held for held in self._held.values())

    def _forget(self, pieces: Iterable[Key]) -> None:
        for piece in pieces:
            self._begun.pop(piece, None)
            for end in self._ends_of.pop(piece, ()):
                for other in self._made_of.pop(end, ()):
                    if other != piece and (ends := self._ends_of.get(other)) is not None:
                        ends.discard(end)
                        if not ends:
                            del self._ends_of[other]

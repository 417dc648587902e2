"""The interface of an engine for the scheduler and the server."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.agent.job_pages import JobKV
from hybrid_cache.layout.layout import ModelLayout

Logits = NDArray[np.float32]

# A millisecond of copying: what an answer's KVCache may cost the tokens of other requests, once per round.
KEEP_BYTES: Final = 4 << 20


class SequenceState(Protocol):
    """The KVCache of one running sequence, inside the engine."""

    @property
    def num_tokens(self) -> int:
        """Tokens whose KVCache is there."""
        ...

    @property
    def marked_tokens(self) -> int:
        """The longest prefix, on a block border, that `Engine.keep` could put into pages; 0: none."""
        ...

    cancelled: bool  # set from another thread; a running prefill then raises PrefillAborted


class AtOnce:
    """The base of engines whose `load` and `prefill` return when all is done."""

    takes_more: Final = True

    def settled(self, sequence: Any) -> bool:
        return True

    def listen(self, on_progress: Callable[[], None]) -> None: ...

    def close(self) -> None: ...


class Engine(Protocol):
    """Computes prefill and decode steps. All methods are called from one thread, one at a time."""

    @property
    def layout(self) -> ModelLayout: ...

    @property
    def max_model_len(self) -> int:
        """Prompt and output together, in tokens."""
        ...

    @property
    def vocab_size(self) -> int: ...

    def new_sequence(self, expected_tokens: int) -> Any:
        """An empty SequenceState; `expected_tokens` is a hint for how long it will grow."""
        ...

    def load(self, sequence: Any, kv: JobKV, num_tokens: int) -> None:
        """Copies the KVCache of the first `num_tokens` out of pages into an empty sequence."""
        ...

    def prefill(self, sequence: Any, tokens: Sequence[int], kv: JobKV | None) -> None:
        """Appends a chunk. With `kv`, each layer's part is written and announced as soon as it has been computed."""
        ...

    @property
    def takes_more(self) -> bool:
        """Whether a `prefill` would begin now. Raises EngineError once the engine cannot compute any more."""
        ...

    def settled(self, sequence: Any) -> bool:
        """Whether `load` and `prefill` have finished all their work. Raises the error if they failed."""
        ...

    def listen(self, on_progress: Callable[[], None]) -> None:
        """`on_progress` is called, on any thread, whenever either of the above may have become true."""
        ...

    def decode(self, sequences: Sequence[Any], tokens: Sequence[int]) -> Sequence[Logits]:
        """Appends one token to each sequence and returns the logits [vocab_size] of their next ones.

        A sequence's logits do not depend on the others. An error fails all of them.
        """
        ...

    def begin_answer(self, sequence: Any) -> None:
        """From here on `decode` saves, at every block border, the parts of the sequence that later steps overwrite."""
        ...

    def keep(self, sequence: Any, kv: JobKV) -> Iterator[None]:
        """Writes the first `marked_tokens` tokens into pages for them, at most KEEP_BYTES with each step. It skips
        tokens that the pages call cached. The sequence must not be computed on meanwhile.
        """
        ...

    def close(self) -> None:
        """Ends what it has started."""
        ...

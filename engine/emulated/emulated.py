"""An engine without a model: real protocol, real pages, invented numbers. No torch.

Prefill takes `a + b · tokens` seconds, a decode step takes a fixed time. A sequence is its running digest

    d[0] = BLAKE2b(""),   d[i] = BLAKE2b(d[i-1] | token i)

K, V and states are that digest repeated, and the next token follows from it. A node that decodes from the right KVCache
emits the tokens of `emulated_tokens`. With a wrong or half-landed block it emits others, or fails while loading.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b, shake_128
from typing import Final

import numpy as np

from engine.agent.base import KEEP_BYTES, AtOnce, Logits
from engine.agent.block_copies import Bytes
from engine.agent.job_pages import JobKV, LayerMap
from engine.byte_tokenizer import SPECIAL_TOKENS, VOCAB_SIZE
from engine.errors import ModelError, PagesInvalid, PrefillAborted
from hybrid_cache.layout.layout import KVCacheGroup, ModelLayout
from hybrid_cache.layout.spec import FullAttention, LinearState, SlidingWindow

DIGEST_BYTES: Final = 32

# The KVCache of the tiny models of engine.torch.tiny, as measured there (fp32).
_GQA: Final = FullAttention(1024, 512, 64, 64)


def _states(*parts: tuple[int, int]) -> KVCacheGroup:
    """Three layers of states of (bytes, elements of the last axis)."""
    spec = LinearState(sum(size for size, _ in parts), tuple((size, "float32", vector) for size, vector in parts))
    return KVCacheGroup(spec, (0, 1, 2))


GROUPS: Final[dict[str, tuple[KVCacheGroup, ...]]] = {
    "kimi_linear": (KVCacheGroup(FullAttention(320, 256, 64, 16), (3,)), _states((12288, 4), (65536, 64))),
    "qwen3_next": (KVCacheGroup(_GQA, (3,)), _states((8192, 4), (65536, 64))),
    "granite_hybrid": (KVCacheGroup(_GQA, (3,)), _states((10240, 4), (131072, 64))),
    "lfm2": (KVCacheGroup(_GQA, (3,)), _states((3072, 3))),
    "gemma3": (KVCacheGroup(_GQA, (3,)), KVCacheGroup(SlidingWindow(128, 1024, 512, 64, 64), (0, 1, 2))),
    "llama": (KVCacheGroup(_GQA, (0, 1, 2, 3)),),
}


@dataclass(frozen=True, slots=True)
class EmulatedTimes:
    """Seconds of model time."""

    prefill_base_s: float = 0.0
    prefill_per_token_s: float = 0.0
    decode_step_s: float = 0.0


def emulated_layout(arch: str, block_size: int) -> ModelLayout:
    """Raises ModelError for an unknown architecture."""
    if arch not in GROUPS:
        raise ModelError(f"unknown architecture {arch!r}: choose one of {', '.join(GROUPS)}")
    return ModelLayout(model=f"emulated-{arch}", dtype="float32", block_size=block_size, groups=GROUPS[arch])


class EmulatedSequence:
    def __init__(self) -> None:
        self.digest = _digest(b"")
        self.digests = bytearray()  # after each token
        self.num_tokens = 0
        self.cancelled = False
        self.answering = False
        self.marked_tokens = 0

    def append(self, tokens: Sequence[int]) -> list[bytes]:
        """The digests after each of `tokens`."""
        digests = []
        for token in tokens:
            self.digest = _digest(self.digest + token.to_bytes(4, "little"))
            digests.append(self.digest)
        self.digests += b"".join(digests)
        self.num_tokens += len(tokens)
        return digests

    def rows(self, start: int, stop: int) -> Bytes:
        """The digests after tokens [start, stop), [tokens, DIGEST_BYTES]."""
        part = self.digests[start * DIGEST_BYTES : stop * DIGEST_BYTES]
        return np.frombuffer(bytes(part), np.uint8).reshape(-1, DIGEST_BYTES)


class EmulatedEngine(AtOnce):
    def __init__(
        self,
        layout: ModelLayout,
        sleep: Callable[[float], None],
        times: EmulatedTimes = EmulatedTimes(),
        *,
        max_model_len: int = 32768,
        vocab_size: int = VOCAB_SIZE,
    ) -> None:
        self.layout: Final = layout
        self.max_model_len: Final = max_model_len
        self.vocab_size: Final = vocab_size
        self._sleep = sleep
        self._times = times
        self._places = LayerMap(layout)
        self._layers = sorted({layer for group in layout.groups for layer in group.layers})

    def new_sequence(self, expected_tokens: int = 0) -> EmulatedSequence:
        return EmulatedSequence()

    def load(self, sequence: EmulatedSequence, kv: JobKV, num_tokens: int) -> None:
        """Takes over the digest that all layers must agree on. Raises PagesInvalid."""
        kv.check_ours()
        rows = [self._attention_digests(kv, layer, num_tokens) for layer in self._places.attention]
        found = {each[-1].tobytes() for each in rows}
        found |= {kv.read_state(layer, num_tokens)[:DIGEST_BYTES].tobytes() for layer in self._places.state}
        kv.check_ours()
        if len(found) != 1:
            raise PagesInvalid(f"layers disagree on the first {num_tokens} tokens")
        sequence.digest, sequence.num_tokens = found.pop(), num_tokens
        sequence.digests[:] = max(rows, key=len).tobytes()  # of full attention, which every emulated model has

    def prefill(self, sequence: EmulatedSequence, tokens: Sequence[int], kv: JobKV | None) -> None:
        chunk_s = self._times.prefill_base_s + self._times.prefill_per_token_s * len(tokens)
        for share in self.prefill_layers(sequence, tokens, kv):
            self._wait(sequence, chunk_s * share)

    def prefill_layers(self, sequence: EmulatedSequence, tokens: Sequence[int], kv: JobKV | None) -> Iterator[float]:
        """`prefill` for a caller that keeps the time: yields the share of it that a layer takes, before it is written."""
        start = sequence.num_tokens
        digests = np.frombuffer(b"".join(sequence.append(tokens)), np.uint8).reshape(-1, DIGEST_BYTES)
        for layer in self._layers:
            yield 1 / len(self._layers)
            if sequence.cancelled:
                raise PrefillAborted
            if kv is not None:
                self._store(kv, layer, start, digests)

    def decode(self, sequences: Sequence[EmulatedSequence], tokens: Sequence[int]) -> Sequence[Logits]:
        """One step, however many there are."""
        if self._times.decode_step_s > 0:
            self._sleep(self._times.decode_step_s)
        return [self._decoded(*each) for each in zip(sequences, tokens, strict=True)]

    def _decoded(self, sequence: EmulatedSequence, token: int) -> Logits:
        sequence.append([token])
        if sequence.answering and not sequence.num_tokens % self.layout.block_size:
            sequence.marked_tokens = sequence.num_tokens
        return _logits(sequence.digest, self.vocab_size)

    def begin_answer(self, sequence: EmulatedSequence) -> None:
        sequence.answering = True

    def keep(self, sequence: EmulatedSequence, kv: JobKV) -> Iterator[None]:
        stop = kv.num_tokens
        assert stop == sequence.marked_tokens
        for layer, place in self._places.attention.items():
            start, row_bytes = kv.cached_tokens, self._row_bytes(place.group)
            if place.group in self.layout.window_groups:
                start = self.layout.window_blocks(place.group, stop).start * self.layout.block_size
            step = max(1, KEEP_BYTES // sum(row_bytes))
            for at in range(start, stop, step):
                digests = sequence.rows(at, min(at + step, stop))
                kv.write_attention(layer, at, *(_rows(digests, size) for size in row_bytes))
                yield
        for layer in self._places.state:
            self._store_state(kv, layer, stop, sequence.rows(stop - 1, stop))
            yield

    def _wait(self, sequence: EmulatedSequence, seconds: float) -> None:
        if seconds > 0:
            self._sleep(seconds)
        if sequence.cancelled:
            raise PrefillAborted

    def _store(self, kv: JobKV, layer: int, start: int, digests: Bytes) -> None:
        stop = start + len(digests)
        if (place := self._places.attention.get(layer)) is not None:
            k_bytes, v_bytes = self._row_bytes(place.group)
            kv.write_attention(layer, start, _rows(digests, k_bytes), _rows(digests, v_bytes))
        if layer in self._places.state and kv.wants_state(stop):
            self._store_state(kv, layer, stop, digests[-1:])

    def _store_state(self, kv: JobKV, layer: int, length: int, digest: Bytes) -> None:
        size = self.layout.slab_bytes(self._places.state[layer].group)
        kv.write_state(layer, length, [_rows(digest, size)])

    def _attention_digests(self, kv: JobKV, layer: int, num_tokens: int) -> Bytes:
        """Reads the digests of every row that a real model would read."""
        place = self._places.attention[layer]
        spec = self.layout.groups[place.group].spec
        start = max(0, num_tokens - (spec.window - 1)) if isinstance(spec, SlidingWindow) else 0
        k, v = kv.read_attention(layer, start, num_tokens)
        if not np.array_equal(k[:, :DIGEST_BYTES], v[:, :DIGEST_BYTES]) or not k[:, :DIGEST_BYTES].any(axis=1).all():
            raise PagesInvalid(f"K and V of layer {layer} do not belong together")
        return k[:, :DIGEST_BYTES]

    def _row_bytes(self, group: int) -> tuple[int, int]:
        spec = self.layout.groups[group].spec
        assert not isinstance(spec, LinearState)
        return spec.k_bytes_per_token, spec.bytes_per_token - spec.k_bytes_per_token


def emulated_tokens(prompt: Sequence[int], max_tokens: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """The greedy continuation of `prompt`, which every emulated engine must emit."""
    sequence = EmulatedSequence()
    sequence.append(prompt)
    tokens: list[int] = []
    for _ in range(max_tokens):
        tokens.append(int(_logits(sequence.digest, vocab_size).argmax()))
        sequence.append(tokens[-1:])
    return tokens


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def _logits(digest: bytes, vocab_size: int) -> Logits:
    noise = np.frombuffer(shake_128(digest).digest(2 * vocab_size), "<u2")
    logits = noise.astype(np.float32) / 8192.0
    logits[: len(SPECIAL_TOKENS)] = -100.0  # answers are as long as they are asked to be
    return logits


def _rows(digests: Bytes, row_bytes: int) -> Bytes:
    repeats = -(-row_bytes // DIGEST_BYTES)
    return np.ascontiguousarray(np.tile(digests, (1, repeats))[:, :row_bytes])

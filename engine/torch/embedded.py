"""The embedded engine: transformers models on torch, KVCache leaving layer by layer while it is computed.

    chunk [a, b)   layer 0 ── layer 1 ── layer 2 ── layer 3        per layer: new K/V -> pages, LayerDone
                                                                   at a snapshot length: states -> pages, StateDone

Prefill never computes logits; the last token of a prompt goes through `decode`, on whichever node samples. In fp32 the
split into chunks moves logits by some 5e-6. Other sequences in the same step move nothing: every loaded model is tested
for that, and one that fails decodes one sequence at a time.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError

from engine.agent.base import KEEP_BYTES, AtOnce, Logits
from engine.agent.identity import DigestMemory, model_files, model_identity
from engine.agent.job_pages import JobKV
from engine.errors import ModelError, PrefillAborted
from engine.torch.apart import are_apart
from engine.torch.cache_argument import cache_argument
from engine.torch.kv_layers import SequenceCache
from engine.torch.layout_of import layout_of, probe
from engine.torch.marks import BorderMarks
from engine.torch.together import BatchCache, run_latent_attention_by_sequence, together
from hybrid_cache.layout.layout import ModelLayout

log = logging.getLogger(__name__)

DEFAULT_CONTEXT_TOKENS: Final = 32768

PROOF_LENGTHS: Final = (2, 3, 5)  # of the sequences that show whether a model decodes in batches
PROOF_TOKENS: Final = (1, 2)

# Options of a model's forward. Without fused kernels KDA materialises masks of chunk × chunk × head_dim per chunk: chunks of
# 16 instead of 64 make prefill 2.7 times as fast on a CPU and move logits by 3e-6.
FORWARD_OPTIONS: Final[dict[str, dict[str, Any]]] = {"kimi_linear": {"chunk_size": 16}}

# What loading raises of a directory that is no model, damaged (SafetensorError), or of a kind that is not known here.
UNREADABLE: Final = (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError)
MISSING_NAMED: Final = 3  # weights


class EmbeddedSequence:
    """One sequence: its cache, its length, and the job whose pages a running prefill fills."""

    def __init__(
        self,
        config: Any,
        expected_tokens: int,
        share: range | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """`share`: the layers that are computed here, all unless given. `is_wanted` is asked at every layer."""
        self.cache: Final = SequenceCache(
            config, expected_tokens, on_kv=self._on_kv, on_state=self._on_state, share=share
        )
        self.num_tokens = 0
        self.cancelled = False
        self._is_wanted = is_wanted
        self.marks: BorderMarks | None = None
        self._job: JobKV | None = None
        self._chunk_stop = 0
        self._may_stop = False
        self._stored_states: set[int] = set()

    @property
    def marked_tokens(self) -> int:
        return self.marks.num_tokens if self.marks is not None else 0

    def begin_chunk(self, stop: int, job: JobKV | None) -> None:
        self._job, self._chunk_stop, self._may_stop = job, stop, True
        self._stored_states.clear()

    def begin_step(self) -> None:
        """Begins a decode step: sequences make it together, and never leave it in the middle."""
        self._job, self._chunk_stop, self._may_stop = None, self.num_tokens + 1, False

    def end_chunk(self) -> None:
        # Pure convolution layers, and models that skip the update call for one token, are final only now.
        if self._job is not None:
            for number in self.cache.linear_layers():
                if number not in self._stored_states:
                    self._on_state(number)
        self.num_tokens = self._chunk_stop
        self.cache.note_length(self.num_tokens)
        self._job = None
        if self.marks is not None:
            self.marks.at(self.num_tokens)

    def load(self, kv: JobKV, num_tokens: int, probed: SequenceCache) -> None:
        """Fills an empty sequence from pages; `probed` has the forms. Raises PagesInvalid; then drop the sequence."""
        kv.check_ours()
        for number, layer in self.cache.attention_layers().items():
            model = probed.layers[number]
            start = layer.stored_from(num_tokens)
            k, v = kv.read_attention(number, start, num_tokens)
            layer.fill(_tokens_like(k, model.keys), _tokens_like(v, model.values), num_tokens)
        for number, layer in self.cache.linear_layers().items():
            model = probed.layers[number]
            if model.states():
                layer.fill_states(*_split_states(kv.read_state(number, num_tokens), model))
        kv.check_ours()
        self.num_tokens = num_tokens
        self.cache.note_length(num_tokens)

    def _on_kv(self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._check_cancelled()
        if self.marks is not None:
            self.marks.on_kv(layer, keys, values)
        if self._job is not None:
            self._job.write_attention(layer, start, _rows(keys), _rows(values))

    def _on_state(self, layer: int) -> None:
        self._check_cancelled()
        if self._job is None or not self._job.wants_state(self._chunk_stop):
            return
        self._stored_states.add(layer)
        states = self.cache.layers[layer].states()
        if states:
            self._job.write_state(layer, self._chunk_stop, [_raw(state) for state in states])

    def _check_cancelled(self) -> None:
        # Layers are where a running chunk can be left: exceptions pass through the model's forward.
        if self._may_stop and (self.cancelled or not self._is_wanted()):
            raise PrefillAborted


class EmbeddedEngine(AtOnce):
    """A causal language model and the layout of its KVCache."""

    def __init__(self, model: Any, *, identity: str, block_size: int, max_model_len: int | None = None) -> None:
        self.model: Final = model.eval()
        self._options = FORWARD_OPTIONS.get(model.config.model_type, {})
        self._cache_argument = cache_argument(model)
        self._probe = probe(model)
        dtype = str(model.dtype).removeprefix("torch.")
        self.layout: Final[ModelLayout] = layout_of(self._probe, identity, dtype, block_size)
        self.max_model_len: Final = context_tokens(model.config, max_model_len)
        self.vocab_size: Final = int(model.config.get_text_config(decoder=True).vocab_size)
        run_latent_attention_by_sequence(model)
        if not are_apart(self.new_sequence, self._fed):
            kind = model.config.model_type
            raise ModelError(f"a {kind} keeps state outside of its cache: one sequence would change another's tokens")
        self.alone_because: Final = self._why_alone()
        if self.alone_because:
            log.warning("sequences decode one at a time: %s", self.alone_because)

    @classmethod
    def load_directory(
        cls,
        directory: Path,
        *,
        block_size: int = 64,
        max_model_len: int | None = None,
        threads: int = 1,
        revision: str = "",
        digests: DigestMemory | None = None,
    ) -> "EmbeddedEngine":
        """Loads any local transformers model; `revision` and `digests` are for its identity. Raises ModelError."""
        torch.set_num_threads(threads)
        files = model_files(directory)
        with ThreadPoolExecutor(1, thread_name_prefix="identity") as beside:
            naming = beside.submit(model_identity, directory, revision=revision, memory=digests)
            model = load_model(directory)
            identity = naming.result()
        if model_files(directory) != files:
            raise ModelError(f"{directory} changed while it was loaded: start again when it is complete")
        return cls(model, identity=identity, block_size=block_size, max_model_len=max_model_len)

    def new_sequence(self, expected_tokens: int = 0) -> EmbeddedSequence:
        return EmbeddedSequence(self.model.config, expected_tokens)

    def load(self, sequence: EmbeddedSequence, kv: JobKV, num_tokens: int) -> None:
        """Fills an empty sequence with the first `num_tokens` tokens. Raises PagesInvalid; then drop the sequence."""
        sequence.load(kv, num_tokens, self._probe)

    def prefill(self, sequence: EmbeddedSequence, tokens: Sequence[int], kv: JobKV | None) -> None:
        sequence.begin_chunk(sequence.num_tokens + len(tokens), kv)
        self._forward(sequence, tokens)
        sequence.end_chunk()

    def decode(self, sequences: Sequence[EmbeddedSequence], tokens: Sequence[int]) -> Sequence[Logits]:
        if len(sequences) == 1 or self.alone_because or not all(sequence.num_tokens for sequence in sequences):
            return [self._decode_alone(*each) for each in zip(sequences, tokens, strict=True)]
        return self._decode_together(sequences, tokens)

    def _decode_alone(self, sequence: EmbeddedSequence, token: int) -> Logits:
        sequence.begin_step()
        logits = self._forward(sequence, [token])
        sequence.end_chunk()
        return logits[0, -1].float().numpy()

    def _decode_together(self, sequences: Sequence[EmbeddedSequence], tokens: Sequence[int]) -> Sequence[Logits]:
        for sequence in sequences:
            sequence.begin_step()
        with torch.inference_mode():
            ids = torch.tensor([[token] for token in tokens], dtype=torch.long)
            positions = torch.tensor([[sequence.num_tokens] for sequence in sequences], dtype=torch.long)
            cache = BatchCache([sequence.cache for sequence in sequences])
            with together(self.model, len(sequences)):
                output = self.model(
                    input_ids=ids,
                    position_ids=positions,
                    use_cache=True,
                    logits_to_keep=1,
                    **{self._cache_argument: cache},
                    **self._options,
                )
        for sequence in sequences:
            sequence.end_chunk()
        return list(output.logits[:, -1].float().numpy())

    def _why_alone(self) -> str | None:
        """The reason against decoding sequences together: tries this model on this machine."""
        try:
            alone, batch = ([self._primed(length) for length in PROOF_LENGTHS] for _ in range(2))
            for token in PROOF_TOKENS:
                tokens = [token] * len(batch)
                expected = [self._decode_alone(sequence, token) for sequence in alone]
                if not np.array_equal(expected, self._decode_together(batch, tokens)):
                    return "logits would depend on the batch"
        except Exception as exc:  # whatever a model's code raises that has another idea of its cache
            return f"{type(exc).__name__}: {exc}"
        return None

    def _fed(self, sequence: EmbeddedSequence, kind: int, num_tokens: int) -> torch.Tensor:
        sequence.begin_chunk(sequence.num_tokens + num_tokens, None)
        logits = self._forward(sequence, [kind % self.vocab_size] * num_tokens)
        sequence.end_chunk()
        return logits[0, -1]

    def _primed(self, length: int) -> EmbeddedSequence:
        sequence = self.new_sequence(length)
        self.prefill(sequence, [index % self.vocab_size for index in range(length)], None)
        return sequence

    def begin_answer(self, sequence: EmbeddedSequence) -> None:
        sequence.marks = BorderMarks(sequence.cache, self.layout, sequence.num_tokens)

    def keep(self, sequence: EmbeddedSequence, kv: JobKV) -> Iterator[None]:
        marks = sequence.marks
        assert marks is not None
        assert marks.num_tokens == kv.num_tokens
        for number, rows in marks.attention(kv.cached_tokens).items():
            per_token = rows.keys[:, :, 0].nbytes + rows.values[:, :, 0].nbytes
            for start, keys, values in rows.pieces(max(1, KEEP_BYTES // per_token)):
                kv.write_attention(number, start, _rows(keys), _rows(values))
                yield
        for number, states in marks.states.items():
            kv.write_state(number, marks.num_tokens, [_raw(state) for state in states])
            yield

    def _forward(self, sequence: EmbeddedSequence, tokens: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            ids = torch.tensor([tokens], dtype=torch.long)
            cache = {self._cache_argument: sequence.cache}
            output = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **cache, **self._options)
        logits: torch.Tensor = output.logits
        return logits


def load_model(directory: Path) -> Any:
    """A transformers model from local files only, in the dtype it was saved in. Raises ModelError."""
    from transformers import AutoModelForCausalLM

    quiet_transformers()
    if not (directory / "config.json").is_file():
        raise ModelError(f"{directory} holds no model (no config.json); `prfaas model build` makes a tiny one")
    try:
        model = loaded(AutoModelForCausalLM, directory)
    except UNREADABLE as exc:
        raise ModelError(f"{directory} cannot be loaded: {exc}") from exc
    return model.eval()


def loaded(model_class: Any, directory: Path) -> Any:
    """A model with all of its weights. Raises ValueError for missing ones, which transformers would make up, and UNREADABLE."""
    model, found = model_class.from_pretrained(
        str(directory), dtype="auto", local_files_only=True, attn_implementation="sdpa", output_loading_info=True
    )
    if missing := sorted(found["missing_keys"]):
        raise ValueError(f"{len(missing)} of its weights are missing: {', '.join(missing[:MISSING_NAMED])}")
    return model


def quiet_transformers() -> None:
    from transformers.utils import logging

    quiet: Any = logging
    quiet.disable_progress_bar()
    quiet.set_verbosity_error()  # else one warning per fused kernel that a CPU cannot have


def context_tokens(config: Any, wanted: int | None) -> int:
    trained = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or DEFAULT_CONTEXT_TOKENS
    if wanted is not None and not 1 < wanted <= trained:
        raise ModelError(f"max_model_len must be in [2, {trained}] for this model, not {wanted}")
    return int(wanted or trained)


# Between tensors and bytes. K and V are [1, heads, tokens, dim] in a cache, [tokens, heads × dim × itemsize] in pages.


def _rows(tensor: torch.Tensor) -> NDArray[np.uint8]:
    rows = tensor[0].transpose(0, 1).contiguous()
    return _bytes(rows).reshape(rows.shape[0], -1)


def _raw(tensor: torch.Tensor) -> NDArray[np.uint8]:
    return _bytes(tensor.contiguous())


def _bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    data: NDArray[np.uint8] = tensor.detach().view(torch.uint8).numpy()
    return data


def _tokens_like(rows: NDArray[np.uint8], model: torch.Tensor) -> torch.Tensor:
    heads, dim = model.shape[1], model.shape[3]
    tensor = torch.from_numpy(rows.reshape(-1)).view(model.dtype).view(rows.shape[0], heads, dim)
    return tensor.transpose(0, 1).unsqueeze(0).contiguous()


def _split_states(data: NDArray[np.uint8], model: Any) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    """Convolution and recurrent states out of a snapshot, shaped like those of the probed layer."""
    offset = 0

    def take(like: torch.Tensor) -> torch.Tensor:
        nonlocal offset
        part = data[offset : offset + like.nbytes].copy()
        offset += like.nbytes
        return torch.from_numpy(part).view(like.dtype).view(like.shape)

    conv = {i: take(state) for i, state in model.conv_states.items() if state is not None}
    recurrent = {i: take(state) for i, state in model.recurrent_states.items() if state is not None}
    return conv, recurrent

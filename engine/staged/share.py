"""A contiguous share of a model's decoder layers: what one stage of a pipeline computes.

    whole    embedding ── layer 0 ── layer 1 ── layer 2 ── layer 3 ── norm, head
    first    embedding ── layer 0 ── layer 1 ─► hidden states
    last     hidden states ► ─ ─ ─ ─ ─ ─ ─ ─ ─  layer 2 ── layer 3 ── norm, head

Lists of layers keep their length: a module that passes on its input replaces a layer that another stage computes. So
indices, masks and caches stay those of the whole model. Hidden states come in behind anything that a model does to
embeddings first. Only the share's own weights are loaded.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from transformers import PretrainedConfig

from engine.agent.job_pages import JobKV
from engine.errors import ModelError
from engine.torch.apart import are_apart
from engine.torch.cache_argument import cache_argument
from engine.torch.embedded import FORWARD_OPTIONS, UNREADABLE, EmbeddedSequence, loaded, quiet_transformers
from engine.torch.kv_layers import SequenceCache
from engine.torch.layout_of import layout_of
from hybrid_cache.layout.layout import ModelLayout

log = logging.getLogger(__name__)

PROOF_TOKENS: Final = 3  # of the chunk that shows whether a model can be shared out


def shares(num_layers: int, stages: int) -> tuple[range, ...]:
    """Which layers each of `stages` computes: as many each as can be, the first ones one more. Raises ModelError."""
    if stages > num_layers:
        raise ModelError(f"{stages} stages for a model of {num_layers} layers: at most one stage per layer")
    size, more = divmod(num_layers, stages)
    stops = [(number + 1) * size + min(number + 1, more) for number in range(stages)]
    return tuple(range(start, stop) for start, stop in zip([0, *stops], stops, strict=False))


class LayerShare:
    """Layers `layers` of a model, and the layout of their KVCache."""

    def __init__(self, model: Any, layers: range, *, identity: str, block_size: int) -> None:
        """`model` has been cut already. Raises ModelError for one that cannot be shared out."""
        self.layers: Final = layers
        self.model: Final = model.eval()
        self._decoder = model.get_decoder()
        self._modules = _list_of_layers(self._decoder)
        self._options = FORWARD_OPTIONS.get(model.config.model_type, {})
        self._is_last = layers.stop == len(self._modules)
        self._prove()
        self._probe = self._probed()
        if not self._keeps_something():
            raise ModelError(f"layers {layers} keep no KVCache: choose fewer stages, so that each has some")
        dtype = str(model.dtype).removeprefix("torch.")
        self.layout: Final[ModelLayout] = layout_of(self._probe, identity, dtype, block_size)

    def new_sequence(self, expected_tokens: int = 0, is_wanted: Callable[[], bool] = lambda: True) -> EmbeddedSequence:
        return EmbeddedSequence(self.model.config, expected_tokens, self.layers, is_wanted)

    def load(self, sequence: EmbeddedSequence, kv: JobKV, num_tokens: int) -> None:
        """The share's part of `Engine.load`."""
        sequence.load(kv, num_tokens, self._probe)

    def prefill(
        self, sequence: EmbeddedSequence, chunk: Sequence[int] | torch.Tensor, num_tokens: int, kv: JobKV | None
    ) -> torch.Tensor | None:
        """A chunk's tokens, or its hidden states from the stage before. Returns those for the next stage; None from the last."""
        sequence.begin_chunk(sequence.num_tokens + num_tokens, kv)
        hidden = self._through(self._decoder, chunk, sequence.cache)[0]
        sequence.end_chunk()
        return hidden

    def decode(self, sequence: EmbeddedSequence, chunk: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """One token's hidden states for the next stage; from the last stage logits, [vocab_size]."""
        sequence.begin_step()
        run = self.model if self._is_last else self._decoder
        hidden, output = self._through(run, chunk, sequence.cache)
        sequence.end_chunk()
        return output.logits[0, -1].float() if hidden is None else hidden

    def _through(
        self,
        run: Any,
        chunk: Sequence[int] | torch.Tensor,
        cache: SequenceCache,
        embeddings: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, Any]:
        """Hidden states behind the share, unless it is the last, and what `run` returned.

        Behind the first stage there are no `embeddings`: anything in their form will do.
        """
        if self.layers.start:
            assert isinstance(chunk, torch.Tensor)
            self._modules[self.layers.start - 1].passes = chunk
            inputs: dict[str, Any] = {"inputs_embeds": chunk if embeddings is None else embeddings}
        else:
            inputs = {"input_ids": torch.as_tensor(chunk, dtype=torch.long).reshape(1, -1)}
        with torch.inference_mode():
            output = run(**inputs, use_cache=True, **{cache_argument(run): cache}, **self._options)
        if self._is_last:
            return None, output
        hidden: torch.Tensor = self._modules[self.layers.stop].seen
        return hidden, output

    def _probed(self) -> SequenceCache:
        """The cache after one token."""
        sequence = self.new_sequence(1)
        self.prefill(sequence, self._any_chunk(1), 1, None)
        return sequence.cache

    def _keeps_something(self) -> bool:
        states = any(layer.states() for layer in self._probe.linear_layers().values())
        return states or any(layer.is_initialized for layer in self._probe.attention_layers().values())

    def _prove(self) -> None:
        """What comes in reaches the first layer, and what the last layer makes of it alone goes out: exactly, or not at all.

        Layers return a tensor in some models and a tuple in others, which nothing but running them tells.
        """
        self._find_form()
        kind = self.model.config.model_type
        if self.layers.start and not self._needs_no_embeddings():
            raise ModelError(f"layers of a {kind} cannot be shared out among stages: they use embeddings")
        if not are_apart(self.new_sequence, self._fed):
            raise ModelError(f"a {kind} keeps state outside of its cache: one sequence would change another's tokens")

    def _find_form(self) -> None:
        complaint = ""
        for in_tuple in (False, True):
            for module in self._modules:
                if isinstance(module, _Elsewhere):
                    module.in_tuple = in_tuple
            try:
                if self._passes():
                    return
            except Exception as exc:  # whatever a model's code raises that has another idea of its layers
                complaint = f": {type(exc).__name__}: {exc}"
        raise ModelError(f"layers of a {self.model.config.model_type} cannot be shared out among stages{complaint}")

    def _passes(self) -> bool:
        first, last = self._modules[self.layers.start], self._modules[self.layers.stop - 1]
        came: list[torch.Tensor] = []
        left: list[torch.Tensor] = []
        hooks = [
            first.register_forward_pre_hook(lambda module, args, kwargs: came.append(_hidden(args, kwargs)), with_kwargs=True),
            last.register_forward_hook(lambda module, args, output: left.append(_tensor(output))),
        ]  # fmt: skip
        try:
            chunk = self._any_chunk(PROOF_TOKENS)
            hidden, _ = self._through(self._decoder, chunk, self.new_sequence(PROOF_TOKENS).cache)
        finally:
            for hook in hooks:
                hook.remove()
        entered = not isinstance(chunk, torch.Tensor) or torch.equal(came[0], chunk)
        return entered and (hidden is None or torch.equal(left[0], hidden))

    def _needs_no_embeddings(self) -> bool:
        """Some models hand them to layers again (Zamba2), or what earlier layers have made."""
        chunk = self._any_chunk(PROOF_TOKENS)
        assert isinstance(chunk, torch.Tensor)
        made = []
        for embeddings in (chunk, chunk.flip(-1)):
            cache = self.new_sequence(PROOF_TOKENS).cache
            hidden, output = self._through(self._decoder, chunk, cache, embeddings)
            made.append(output[0] if hidden is None else hidden)
        return torch.equal(*made)

    def _fed(self, sequence: EmbeddedSequence, kind: int, num_tokens: int) -> torch.Tensor:
        sequence.begin_chunk(sequence.num_tokens + num_tokens, None)
        hidden, output = self._through(self._decoder, self._any_chunk(num_tokens, kind), sequence.cache)
        sequence.end_chunk()
        made: torch.Tensor = output[0] if hidden is None else hidden
        return made

    def _any_chunk(self, tokens: int, kind: int = 0) -> Sequence[int] | torch.Tensor:
        """Another one for each `kind`."""
        if not self.layers.start:
            return [kind] * tokens
        size = self.model.config.get_text_config(decoder=True).hidden_size
        numbers = torch.Generator().manual_seed(kind)
        return torch.randn((1, tokens, size), generator=numbers).to(self.model.dtype)


class _Elsewhere(nn.Module):
    """In the place of a layer that another stage computes. Of it stay the plain attributes, which models look at."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        plain = {name: value for name, value in vars(layer).items() if isinstance(value, str | int | float)}
        for name, value in plain.items():
            if not hasattr(self, name):
                setattr(self, name, value)
        self.in_tuple = False
        self.passes: torch.Tensor | None = None  # instead of what comes in
        self.seen: torch.Tensor

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.seen = hidden_states
        hidden, self.passes = hidden_states if self.passes is None else self.passes, None
        return (hidden,) if self.in_tuple else hidden


def load_share(directory: Path, layers: range) -> Any:
    """A transformers model with only `layers`, and what belongs to the ends. Raises ModelError."""
    from transformers import AutoConfig, AutoModelForCausalLM

    quiet_transformers()
    try:
        config = AutoConfig.from_pretrained(str(directory), local_files_only=True)
        kind: Any = AutoModelForCausalLM
        model_class = kind._model_mapping[type(config)]
        try:
            model = loaded(_cut_when_made(model_class, layers), directory)
        except AttributeError as exc:  # models that look into all their layers while they are loaded, as Falcon-H1
            log.warning("all weights of %s are loaded, and dropped but for %s: %s", directory, layers, exc)
            model = loaded(model_class, directory)
            cut(model, layers)
    except UNREADABLE as exc:
        raise ModelError(f"{directory} cannot be loaded in stages: {exc}") from exc
    return model.eval()


def _cut_when_made(model_class: Any, layers: range) -> Any:
    """Models that are cut between their making, which allocates nothing, and their loading, which takes what has a place."""

    def make(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, config, *args, **kwargs)
        cut(self, layers)

    return type(model_class.__name__, (model_class,), {"__init__": make, "__module__": model_class.__module__})


def cut(model: Any, layers: range) -> None:
    """Leaves of a model `layers` alone, with its embedding for the first and its head for the last. Raises ModelError."""
    decoder = model.get_decoder()
    modules = _list_of_layers(decoder)
    is_first, is_last = layers.start == 0, layers.stop == len(modules)
    for number, layer in enumerate(modules):
        if number not in layers:
            modules[number] = _Elsewhere(layer)
    tied = model.config.get_text_config(decoder=True).tie_word_embeddings
    if not is_first and not (is_last and tied):
        decoder.set_input_embeddings(nn.Identity())
    if not is_last:
        model.set_output_embeddings(nn.Identity())
        model.all_tied_weights_keys = {}


def num_layers_of(directory: Path) -> int:
    """The number of layers of a model that could be shared out. Raises ModelError."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(directory), local_files_only=True)
    except (OSError, ValueError, KeyError) as exc:
        raise ModelError(f"{directory} cannot be loaded: {exc}") from exc
    return int(config.get_text_config(decoder=True).num_hidden_layers)


def _list_of_layers(decoder: Any) -> Any:
    if not isinstance(getattr(decoder, "config", None), PretrainedConfig):
        raise ModelError(f"a {type(decoder).__name__} in the place of a decoder has no layers that could be shared out")
    count = decoder.config.get_text_config(decoder=True).num_hidden_layers
    lists = [each for each in decoder.children() if isinstance(each, nn.ModuleList) and len(each) == count]
    if len(lists) != 1:
        raise ModelError(f"a {decoder.config.model_type} has no list of its layers that could be shared out")
    return lists[0]


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


def _tensor(output: Any) -> torch.Tensor:
    hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return hidden

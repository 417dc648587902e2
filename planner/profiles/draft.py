"""A profile drafted from a model's config.json and from results of benchmarks on one kind of hardware."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from planner.errors import InputError
from planner.model.memory import MemoryProfile
from planner.model.profile import KvSize, dump_curve, parse_profile
from planner.model.reading import named
from planner.profiles.config import ModelConfig, dtype_bytes, read_config
from planner.profiles.curves import decode_profile, prefill_curve, timed_lengths
from planner.profiles.families import model_layers
from planner.profiles.gpus import Gpu
from planner.profiles.mixers import ElementBytes, HeadAttention, LatentAttention, ModelLayer
from planner.profiles.plausible import LeastWork, check_batches, check_prefills
from planner.profiles.results.run import BenchmarkRun
from planner.profiles.sizes import described, kv_size_of, layout_of_layers
from planner.profiles.weights import WeightBytes, WeightCounts, indexed_bytes, kv_dtype, weight_bytes
from transport.control.settings import SettingsError, mapped, shown

USABLE_SHARE: Final = 0.9  # what engines use of HBM unless told otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class ByHand:
    """What a person says of a model, instead of its config.json or beside it."""

    family: str | None = None
    kv_dtype: str | None = None
    state_dtype: str | None = None
    bytes_per_token: float | None = None
    fixed_bytes: float | None = None
    weights_gb: float | None = None
    kv_copies: float | None = None
    max_running: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """What is known of a model without running it. `work` and `weights` are None where its layers are not known."""

    name: str
    kv: KvSize
    weights: WeightBytes | None
    work: LeastWork | None
    kv_copies_of: Sequence[ModelLayer] = ()

    def kv_copies(self, gpus: int) -> float:
        """Tensor parallelism over more GPUs than KV heads copies them; a latent is one for all heads."""
        mixers = [mixer for layer in self.kv_copies_of for mixer in layer.mixers]
        heads = [mixer.kv_heads for mixer in mixers if isinstance(mixer, HeadAttention)]
        heads += [1 for mixer in mixers if isinstance(mixer, LatentAttention)]
        return max(1.0, gpus / min(heads)) if heads else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """`gpus` equal GPUs that hold the model together."""

    hardware: str
    gpus: int
    gpu: Gpu | None


def known_model(path: Path, hand: ByHand) -> KnownModel:
    """Raises InputError naming the file and the key."""
    with named(f"config {path}"):
        config = read_config(path)
        by_index = indexed_bytes(path if path.is_dir() else path.parent)
        name = str(
            config.table.get("_name_or_path") or path.resolve().parent.name if path.is_file() else path.resolve().name
        )
        if hand.bytes_per_token is not None or hand.fixed_bytes is not None:
            return KnownModel(name=name, kv=_kv_by_hand(hand), weights=_weights_by_hand(hand, by_index), work=None)
        layers = model_layers(config, hand.family)
        counts = WeightCounts.of(config, layers)
        kv = _kv_size(config, layers, hand)
        by_hand = _weights_by_hand(hand, by_index)
        weights = weight_bytes(config, counts) if by_hand is None else _computed(by_hand, config, counts)
        return KnownModel(
            name=name, kv=kv, weights=weights, work=LeastWork(counts=counts, layers=layers), kv_copies_of=layers
        )


def _kv_by_hand(hand: ByHand) -> KvSize:
    return KvSize(
        fixed_bytes=hand.fixed_bytes or 0.0, bytes_per_token=hand.bytes_per_token or 0.0,
        provenance="unverified: given by hand (--kv-bytes-per-token, --state-bytes)",
    )  # fmt: skip


def _weights_by_hand(hand: ByHand, by_index: float | None) -> WeightBytes | None:
    if hand.weights_gb is not None:
        return WeightBytes(1e9 * hand.weights_gb, None, "weights given by hand (--weights-gb)", 2.0)
    if by_index is not None:
        return WeightBytes(by_index, 0.0, "weights as their index says", 2.0)
    return None


def _computed(said: WeightBytes, config: ModelConfig, counts: WeightCounts) -> WeightBytes:
    """With the least bytes that one weight can have: an unknown quantisation is told from the bytes of all."""
    least = said.total / max(1, counts.total)
    with suppress(SettingsError):
        least = min(least, weight_bytes(config, counts).computed)
    return replace(said, computed=least)


def _kv_size(config: ModelConfig, layers: Sequence[ModelLayer], hand: ByHand) -> KvSize:
    dtype, said = (hand.kv_dtype, "--kv-dtype") if hand.kv_dtype else kv_dtype(config)
    state_dtype, state_said = _state_dtype(config, hand)
    kv_bytes = dtype_bytes("--kv-dtype", dtype)
    element = ElementBytes(kv=kv_bytes, state=dtype_bytes("--state-dtype", state_dtype), convolution=max(kv_bytes, 2.0))
    layout = layout_of_layers(config.model_type, str(dtype), layers, element)
    states = f"; states in {state_dtype} ({state_said})" if layout.state_groups else ""
    is_sure = "assumed" not in said and not (states and "assumed" in state_said)
    return kv_size_of(
        layout, f"derived: config.json, {config.model_type}, {described(layout)}; KVCache in {dtype} ({said}){states}",
        0.0 if is_sure else None,
    )  # fmt: skip


def _state_dtype(config: ModelConfig, hand: ByHand) -> tuple[str, str]:
    if hand.state_dtype:
        return hand.state_dtype, "--state-dtype"
    for key in ("mamba_ssm_dtype", "mamba_ssm_cache_dtype"):
        if isinstance(said := config.table.get(key), str) and said != "auto":
            return said, key
    return "float32", "assumed; --state-dtype says otherwise"


def drafted(model: KnownModel, instance: Instance | None, runs: Sequence[BenchmarkRun], hand: ByHand) -> dict[str, Any]:
    """The JSON form of a profile. Raises InputError for figures that cannot belong together."""
    document: dict[str, Any] = {"schema": 1, "model": model.name, "kv": _stated(model.kv)}
    if instance is None:
        return document
    memory = _memory(model, instance, hand)
    if memory is not None:
        document["memory"] = {instance.hardware: _stated(memory)}
    if runs:
        with mapped(InputError):
            curve, decode = prefill_curve(runs), decode_profile(runs, hand.max_running)
        # Data-parallel attention keeps one copy only: what fits then is possible.
        most = memory if memory is None or hand.kv_copies else replace(memory, kv_copies=1.0)
        _check(model, instance, runs, most)
        document["prefill"] = {instance.hardware: dump_curve(curve)}
        if decode is not None:
            document["decode"] = {instance.hardware: _stated(decode)}
    return document


def _memory(model: KnownModel, instance: Instance, hand: ByHand) -> MemoryProfile | None:
    if instance.gpu is None or model.weights is None:
        return None
    copies = hand.kv_copies or model.kv_copies(instance.gpus)
    why = "--kv-copies" if hand.kv_copies else "tensor parallel; --kv-copies 1 where engines split requests instead"
    kept = "once" if copies == 1 else f"{copies:g} times ({why})"
    assumed = f"{USABLE_SHARE:.0%} of HBM usable (assumed); KVCache {kept}"
    said = "as its driver reports it" if instance.gpu.is_known else "given by hand"
    with mapped(InputError):
        return MemoryProfile(
            gpus=instance.gpus, hbm_bytes_per_gpu=instance.gpu.memory_bytes, weights_bytes=model.weights.total,
            usable_share=USABLE_SHARE, kv_copies=copies, error=model.weights.error,
            provenance=f"derived: {model.weights.origin}, shared evenly; HBM of {instance.gpu.name} {said}; {assumed}",
        )  # fmt: skip


def _check(model: KnownModel, instance: Instance, runs: Sequence[BenchmarkRun], memory: MemoryProfile | None) -> None:
    if instance.gpu is not None and model.work is not None and model.weights is not None:
        peak = instance.gpus * instance.gpu.peak_flops(model.weights.computed)
        alone = [run for run in runs if run.is_alone]
        check_prefills(timed_lengths(alone), model.work, peak, f"{instance.gpus} × {instance.gpu.name}")
    if memory is not None:
        check_batches(runs, model.kv, memory)


def _stated(part: Any) -> dict[str, Any]:
    """A part of a profile in JSON, without what it does not say."""
    table = {key: value for key, value in asdict(part).items() if value not in (None, ())}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in table.items()}


def added_to(document: dict[str, Any], drafted: dict[str, Any]) -> dict[str, Any]:
    """A profile with the hardware of another one as well. Raises InputError where they are of different models."""
    there, here = parse_profile(document).kv, parse_profile(drafted).kv_size()
    if there is not None:
        for key in ("bytes_per_token", "fixed_bytes", "windows"):
            ours, theirs = getattr(there, key), getattr(here, key)
            if ours != theirs:
                raise InputError(
                    f"--add-to: kv.{key} = {_said(ours)} there and {_said(theirs)} in this one: profiles of different models"
                )
    merged = dict(document)
    if there is None:
        merged["kv"] = drafted["kv"]
    for part in ("prefill", "decode", "memory"):
        if part in drafted:
            merged[part] = document.get(part, {}) | drafted[part]
    return merged


def _said(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else shown(value)

"""How many weights a model has, how many a token uses, and how many bytes they take."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from planner.model.reading import Range, read_json
from planner.profiles.config import DTYPE_BYTES, ModelConfig, dtype_bytes
from planner.profiles.mixers import ModelLayer
from transport.control.settings import SettingsError, require_table, shown

INDEX_FILE: Final = "model.safetensors.index.json"
COUNTED_ERROR: Final = 0.01  # norms and biases are not counted; of eight public models the counts are within 0.1 %
QUANTISED_ERROR: Final = 0.05  # nor is each matrix that is left unquantised
ENCODER_ERROR: Final = 0.1  # nor encoders of images and sound
ALL_BYTES: Final = Range(1, 1e14, "bytes")
BITS: Final = Range(1, 16, "bits")
GROUP_BITS: Final = 20.0  # a scale and a zero point for each group
_ATTENTION: Final = re.compile(r"(attn|attention|[qkvo]_proj|qkv_proj|in_proj_qkvz?|mixer|mamba)\W*$")
_LAYER: Final = re.compile(r"layers\.(\d+)\.")
_BY_METHOD: Final = {"fp8": 8.0, "fbgemm_fp8": 8.0, "mxfp4": 4.25, "bitsandbytes": 4.5}
_BY_ALGORITHM: Final = {"FP8": 8.0, "NVFP4": 4.5, "W4A16_AWQ": 4.5, "W4A8_AWQ": 4.5, "MXFP4": 4.25}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCounts:
    """Weights of a language model, by what they are for."""

    embedding: int  # input and output
    attention: int
    dense: int
    experts: int
    chosen: int  # of the experts' weights, those that a token uses

    @classmethod
    def of(cls, config: ModelConfig, layers: Sequence[ModelLayer]) -> Self:
        """Raises SettingsError."""
        table = config.whole("vocab_size", least=1) * config.hidden
        parts = [layer.feed_forward for layer in layers]
        return cls(
            embedding=table if config.has("tie_word_embeddings") else 2 * table,
            attention=sum(mixer.weights(config.hidden) for layer in layers for mixer in layer.mixers),
            dense=sum(part.dense for part in parts),
            experts=sum(part.expert * part.experts for part in parts),
            chosen=sum(part.expert * part.chosen for part in parts),
        )

    @property
    def total(self) -> int:
        return self.embedding + self.attention + self.dense + self.experts

    @property
    def used(self) -> int:
        """Of each token of a prompt; the output head is needed for the last one only."""
        return self.attention + self.dense + self.chosen


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of all weights, how far that may be off, where it comes from, and bytes of one as it is computed with."""

    total: float
    error: float | None
    origin: str
    computed: float


def weight_bytes(config: ModelConfig, counts: WeightCounts) -> WeightBytes:
    """From the counts, the type and the quantisation. Raises SettingsError."""
    plain = dtype_bytes("torch_dtype", config.dtype)
    origin = f"{counts.total / 1e9:.1f}B weights{' without encoders' if config.is_nested else ''}"
    error = ENCODER_ERROR if config.is_nested else COUNTED_ERROR
    quantised, left = _quantisation(config)
    if quantised is None:
        return WeightBytes(plain * counts.total, error, f"{origin}, {config.dtype}", plain)
    share = _attention_left(left, config.num_layers)
    attention = share * plain + (1 - share) * quantised
    total = plain * counts.embedding + attention * counts.attention + quantised * (counts.dense + counts.experts)
    method = f"quantization_config, {8 * quantised:g} bits"
    return WeightBytes(total, max(error, QUANTISED_ERROR), f"{origin}, {method}", quantised)


def _attention_left(names: Sequence[str], num_layers: int) -> float:
    """The share of attention that is not quantised: names end in a whole part of it, of one layer or of all."""
    found = [name for name in names if _ATTENTION.search(name)]
    layers = [_LAYER.search(name) for name in found]
    if not all(layers):
        return 1.0
    return min(1.0, len({each[1] for each in layers if each}) / num_layers)


def indexed_bytes(folder: Path) -> float | None:
    """What the index beside the weights says. Raises SettingsError or OSError."""
    path = folder / INDEX_FILE
    if not path.is_file():
        return None
    metadata = require_table(read_json(path).get("metadata", {}), f"{INDEX_FILE}: metadata")
    if "total_size" not in metadata:
        return None
    return ALL_BYTES.of(f"{INDEX_FILE}: metadata.total_size", metadata["total_size"])


def kv_dtype(config: ModelConfig) -> tuple[str, str]:
    """Of KVCache, and where that is said: a quantised model may bring a type of its own. Raises SettingsError."""
    scheme = _scheme(config)
    if scheme is not None:
        inner = scheme.part("kv_cache_scheme")
        if inner is not None and BITS.of("kv_cache_scheme.num_bits", inner.table.get("num_bits", 8)) == 8:
            return "fp8", "kv_cache_scheme"
        if str(scheme.table.get("kv_cache_quant_algo")).upper() == "FP8":
            return "fp8", "kv_cache_quant_algo"
    dtype = config.dtype.removeprefix("torch.")
    if dtype not in DTYPE_BYTES or DTYPE_BYTES[dtype] > 2:
        return "bfloat16", f"assumed: engines serve {dtype} in bfloat16; --kv-dtype says otherwise"
    return dtype, "torch_dtype"


def _scheme(config: ModelConfig) -> ModelConfig | None:
    return config.part("quantization_config") or config.part("compression_config")


def _quantisation(config: ModelConfig) -> tuple[float | None, list[str]]:
    """Bytes of a quantised weight, None where none is; and the names of what is left as it was."""
    scheme = _scheme(config)
    if scheme is None:
        return None, []
    left: list[str] = []
    for key in ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules"):
        named = scheme.table.get(key)
        left += [str(each) for each in named] if isinstance(named, list) else []
    return _bits(scheme) / 8, left


def _bits(scheme: ModelConfig) -> float:
    """Of a quantised weight, its share of scales included. Raises SettingsError for a method that is not known."""
    table = scheme.table
    if (algorithm := str(table.get("quant_algo")).upper()) in _BY_ALGORITHM:
        return _BY_ALGORITHM[algorithm]
    method = str(table.get("quant_method"))
    if method in _BY_METHOD:
        return 8.0 if table.get("load_in_8bit") else _BY_METHOD[method]
    groups = table.get("config_groups")
    inner: Any = next(iter(groups.values()), None) if isinstance(groups, dict) else table
    inner = inner.get("weights", inner) if isinstance(inner, dict) else None
    inner = inner if isinstance(inner, dict) else {}
    for key in ("num_bits", "bits", "w_bit"):
        if inner.get(key) is not None:
            return _with_scales(BITS.of(f"quantization_config.{key}", inner[key]), inner)
    raise SettingsError(
        f"quantization_config: quant_method = {shown(table.get('quant_method'))}: an unknown one; give --weights-gb"
    )


def _with_scales(bits: float, table: dict[str, Any]) -> float:
    group = table.get("group_size")
    return bits + (GROUP_BITS / group if isinstance(group, int) and group > 0 else 0.0)

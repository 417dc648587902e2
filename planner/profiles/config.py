"""A model's config.json (Hugging Face): the numbers of its language model, wherever a family puts them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

from planner.model.reading import Range, read_json
from transport.control.settings import SettingsError, require, require_table, shown

CONFIG_FILE: Final = "config.json"
NESTED: Final = ("text_config", "llm_config", "language_config")  # where multimodal models keep the language model's
ENCODERS: Final = ("vision_config", "audio_config")  # some models have these beside the language model's keys
# What published files leave out, because it is their family's default. Embeddings are one table.
_TIED: Final = {"tie_word_embeddings": True}
DEFAULTS: Final = MappingProxyType[str, Mapping[str, Any]]({
    "cohere": _TIED, "cohere2": _TIED, "gemma": _TIED, "gemma2": _TIED, "starcoder2": _TIED, "lfm2": _TIED, "lfm2_moe": _TIED,
    "gemma3_text": {
        **_TIED, "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    },
})  # fmt: skip
COUNT: Final = Range(0, 1e8, is_whole=True)
LAYERS: Final = Range(1, 10_000, is_whole=True)
DTYPE_BYTES: Final = {
    "float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "float8_e4m3fn": 1.0, "float8_e5m2": 1.0, "fp8": 1.0,
}  # fmt: skip


def dtype_bytes(name: str, dtype: Any) -> float:
    """Bytes of a number. Raises SettingsError for a type that is not known."""
    key = str(dtype).removeprefix("torch.")
    require(key in DTYPE_BYTES, name, dtype, f"one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[key]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The language model's part of a config.json."""

    model_type: str
    table: Mapping[str, Any]
    is_nested: bool = False  # in a model that also sees or hears

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """What the outer table says holds where the nested one is silent, then the family's default. Raises SettingsError."""
        inner: dict[str, Any] = {}
        for key in NESTED:
            if document.get(key) is not None:
                inner = require_table(document[key], key)
                break
        table = {key: value for key, value in document.items() if key not in NESTED} | inner
        model_type = inner.get("model_type") or document.get("model_type")
        if not isinstance(model_type, str):
            raise SettingsError("missing: model_type, so this is no config.json of a model; its folder has one")
        default = dict(DEFAULTS.get(model_type, {}))
        table = default | {key: value for key, value in table.items() if key not in default or value is not None}
        return cls(model_type, table, bool(inner) or any(document.get(key) is not None for key in ENCODERS))

    def has(self, name: str) -> bool:
        """A key that says something: null and false do not."""
        return self.table.get(name) not in (None, False)

    def whole(self, *names: str, default: int | None = None, least: int = 0) -> int:
        """The first of these keys that is there. Raises SettingsError naming it."""
        for name in names:
            if (value := self.table.get(name)) is not None:
                COUNT.of(name, value)
                require(value >= least, name, value, f"at least {least}")
                return int(value)
        if default is None:
            raise SettingsError(f"missing: {' or '.join(names)}")
        return default

    def rows(self, name: str, length: int) -> list[Any] | None:
        """A list with something for each layer; None where the key is not there. Raises SettingsError."""
        if (value := self.table.get(name)) is None:
            return None
        require(
            isinstance(value, list) and len(value) == length, name, value, f"a list of {length}, one for each layer"
        )
        return list(value)

    def numbers(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers, empty where the key is not there. Raises SettingsError."""
        value = self.table.get(name)
        if value is None:
            return ()
        require(isinstance(value, list), name, value, "a list of whole numbers")
        return tuple(int(COUNT.of(f"{name}[{at}]", each)) for at, each in enumerate(value))

    def part(self, name: str) -> "ModelConfig | None":
        """A table inside. Raises SettingsError."""
        if self.table.get(name) is None:
            return None
        return ModelConfig(self.model_type, require_table(self.table[name], name))

    @property
    def num_layers(self) -> int:
        """Raises SettingsError."""
        return int(LAYERS.of("num_hidden_layers", self.whole("num_hidden_layers", "n_layer", "num_layers")))

    @property
    def hidden(self) -> int:
        """Raises SettingsError."""
        return self.whole("hidden_size", "n_embd", least=1)

    @property
    def dtype(self) -> str:
        """Of what is not quantised; bfloat16 where nothing is said."""
        return str(self.table.get("torch_dtype") or self.table.get("dtype") or "bfloat16")


def read_config(path: Path) -> ModelConfig:
    """A config.json, or the one in a folder. Raises SettingsError or OSError."""
    file = path / CONFIG_FILE if path.is_dir() else path
    try:
        return ModelConfig.of(read_json(file))
    except FileNotFoundError as exc:
        found = "no such file" if file == path else f"no {CONFIG_FILE} in that folder"
        raise SettingsError(f"{found}: give the {CONFIG_FILE} that lies beside the model's weights") from exc


def family_unknown(config: ModelConfig, known: str) -> SettingsError:
    """For a model whose layers cannot be told from its configuration."""
    return SettingsError(
        f"model_type = {shown(config.model_type)}: an unknown family, so what its layers keep is missing. Known are {known}. "
        "If it is built like one of these, give --family NAME; else --kv-bytes-per-token, --state-bytes and --weights-gb"
    )

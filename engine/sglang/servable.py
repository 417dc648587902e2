"""Checks a model's config.json and its server's flags before a minute is spent on loading. `pools.refusal_of` later
refuses what only a loaded server shows: ranks that a file asks for, states beside pages of attention.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

MAX_CONFIG_BYTES: Final = 4 << 20

# Flags that the node's own configuration speaks for, with the key that does.
OURS: Final[Mapping[str, str]] = {
    "--model-path": "model",
    "--model": "model",
    "--served-model-name": "served_model",
    "--host": "host",
    "--port": "engine_port",
    "--config": "engine_args, flag by flag",
    "--disaggregation-mode": "role",
    "--disaggregation-transfer-backend": "engine",
    "--disaggregation-bootstrap-port": "bootstrap_port",
    "--kv-events-config": "engine",
}
RANKS: Final = "one agent serves one rank"
# Flags with the value from which on the backend cannot follow; None: whatever the value.
REFUSED: Final[Mapping[str, tuple[int | None, str]]] = {
    "--tensor-parallel-size": (2, RANKS),
    "--data-parallel-size": (2, RANKS),
    "--pipeline-parallel-size": (2, RANKS),
    "--attention-context-parallel-size": (2, RANKS),
    "--attn-cp-size": (2, RANKS),
    "--nnodes": (2, RANKS),
    "--enable-lora": (None, "adapters are not handed over"),
    "--lora-paths": (None, "adapters are not handed over"),
    "--speculative-algorithm": (None, "draft models have not been run with this backend"),
    "--enable-hierarchical-cache": (None, "an agent serves the disaggregation or the hierarchical cache, not both"),
    "--enable-pd-role-switch": (None, "the node's role is its server's"),
    "--enable-hisparse": (None, "it needs more of a backend than pages"),
    "--is-embedding": (None, "it generates nothing"),
    "--skip-tokenizer-init": (None, "texts could not be asked for"),
    "--api-key": (None, "gateways have no key for engines: keep the port inside"),
    "--ssl-keyfile": (None, "gateways ask engines without certificates"),
    "--ssl-certfile": (None, "gateways ask engines without certificates"),
}
SHORT: Final = {
    "--tp": "--tensor-parallel-size",
    "--tp-size": "--tensor-parallel-size",
    "--dp": "--data-parallel-size",
    "--dp-size": "--data-parallel-size",
    "--pp-size": "--pipeline-parallel-size",
}


def complaint_about_flags(flags: Sequence[str]) -> str | None:
    """The reason why these flags cannot be passed on; None if they can."""
    for name, value in _values(flags):
        if name in OURS:
            return f"{name} is set by the node: use its {OURS[name]}"
        if name not in REFUSED:
            continue
        least, why = REFUSED[name]
        if least is None or (value.isdigit() and int(value) >= least):
            return f"{name}{'' if least is None else f' {value}'}: {why}"
    return None


class NotServable(ValueError):
    """A model that no server could serve; says why."""


def config_of(model: str) -> Mapping[str, Any]:
    """The config.json of the model at this path. Raises NotServable."""
    directory = Path(model)
    if not directory.is_dir():
        raise NotServable(f"{model} is not a directory, and a name does not tell which weights it means")
    path = directory / "config.json"
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise NotServable(f"{path} is larger than {MAX_CONFIG_BYTES} bytes")
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise NotServable(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise NotServable(f"{path} holds no JSON object")
    if config.get("is_encoder_decoder"):
        raise NotServable(f"{path} is of an encoder-decoder: a prompt's KVCache is not all in its decoder's layers")
    return config


def context_of(config: Mapping[str, Any]) -> int | None:
    """The longest prompt that a model was made for, as far as its configuration says."""
    text = config.get("text_config")
    length = (text if isinstance(text, dict) else config).get("max_position_embeddings")
    return length if isinstance(length, int) and length > 0 else None


def _values(flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    for index, flag in enumerate(flags):
        name, has_value, value = flag.partition("=")
        name = SHORT.get(name := name.replace("_", "-"), name)
        yield name, value if has_value else flags[index + 1] if index + 1 < len(flags) else ""

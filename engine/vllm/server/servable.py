"""Checks a model's config.json and its server's flags before minutes are spent on loading.

The config.json of a model that vLLM downloads is the one that was downloaded before, if there is one.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from engine.vllm.server.hub_cache import cached_file

MAX_CONFIG_BYTES: Final = 4 << 20

# Flags with the value from which on the connector cannot follow.
FLAGS: Final[Mapping[str, tuple[int, str]]] = {
    "--decode-context-parallel-size": (2, "the connector does not support context parallelism"),
    "--prefill-context-parallel-size": (2, "the connector does not support context parallelism"),
}
DATA_PARALLEL: Final = "--data-parallel-size"
RANK: Final = "--data-parallel-rank"  # with it, a server has this rank's engine alone
LOCAL: Final = "--data-parallel-size-local"
FIRST: Final = "--data-parallel-start-rank"
SHORT: Final = {
    "-dcp": "--decode-context-parallel-size",
    "-dp": DATA_PARALLEL,
    "-dpn": RANK,
    "-dpl": LOCAL,
    "-dpr": FIRST,
}
# Ends of names that no generating model of vLLM has. A bare `Model` is not among them: ChatGLMModel generates.
POOLING: Final = (
    "ForSequenceClassification", "ForTokenClassification", "ForMaskedLM", "ForRewardModel", "BertModel", "RobertaModel",
)  # fmt: skip
STATES_ONLY: Final = frozenset({"mamba", "mamba2", "falcon_mamba", "rwkv", "rwkv6", "rwkv7"})  # model_type


CONFIG: Final = "config.json"
REVISION: Final = "--revision"
# Where it is set, vLLM's names are those of another hub, with a cache of its own.
OTHER_HUB: Final = "VLLM_USE_MODELSCOPE"


def complaint_about_model(model: str, flags: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """The reason why the model of this directory or name cannot be served; None if it can, or is not known yet."""
    try:
        path = _config_of(model, flags, environment)
    except (OSError, ValueError):  # a name that is no path, a cache in disorder: vLLM says what becomes of it
        return None
    try:
        if path is None or not path.is_file() or path.stat().st_size > MAX_CONFIG_BYTES:
            return None
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        return f"{path} cannot be read: {error}"
    return refusal_of(config) if isinstance(config, dict) else f"{path} holds no JSON object"


def _config_of(model: str, flags: Sequence[str], environment: Mapping[str, str]) -> Path | None:
    if (path := Path(model)).exists():
        return path / CONFIG
    if environment.get(OTHER_HUB, "").lower() in ("1", "true"):
        return None
    revision = next((value for name, value in reversed(list(_values(flags))) if name == REVISION), "")
    return cached_file(model, revision, CONFIG, environment)


def refusal_of(config: Mapping[str, Any]) -> str | None:
    """The reason why a model with this configuration (transformers' config.json) cannot be served through the
    connector."""
    text = config.get("text_config")
    inner: Mapping[str, Any] = text if isinstance(text, dict) else config
    architectures = config.get("architectures") or []
    named = next((name for name in architectures if isinstance(name, str)), "")
    if config.get("is_encoder_decoder"):
        return f"{named or 'the model'} is an encoder-decoder: a prompt's KVCache is not all in its decoder's layers"
    if named.endswith(POOLING):
        return f"{named} generates nothing: there is no prefill to take over"
    if inner.get("model_type") in STATES_ONLY:
        return f"{named or inner.get('model_type')} has no attention layer: there are no blocks that a prompt could be cut into"
    return None


def complaint_about_parallelism(flags: Sequence[str], *, nodes: int = 1) -> str | None:
    """The reason why a server with these flags, and so many nodes, cannot be served through the connector."""
    said = dict(_values(flags))
    for name, (least, why) in FLAGS.items():
        if _number(said, name) >= least:
            return f"{name} {said[name]}: {why}"
    if RANK not in said and _number(said, DATA_PARALLEL) not in (0, nodes):
        return f"{DATA_PARALLEL} {said[DATA_PARALLEL]}: {instead_of_one_node(said)}"
    return None


def instead_of_one_node(said: Mapping[str, str]) -> str:
    """What starts the engines that these flags ask for."""
    size, first = _number(said, DATA_PARALLEL), _number(said, FIRST)
    here = min(_number(said, LOCAL) or size, size)
    ranks = f"--ranks {here}" + (f" --first-rank {first}" if first else "")
    elsewhere = " --data-parallel-address HOST --data-parallel-rpc-port PORT" if here < size else ""
    one_server = (
        "" if here < size or first else f"`prfaas node ... -- {DATA_PARALLEL} {size}` has all in one server, and "
    )
    return (
        f"a node has one engine. {one_server}`prfaas node {ranks} ... -- {DATA_PARALLEL} {size}{elsewhere}` has a server for "
        "each of its nodes, with --ranks alone if the model has no experts; gateways balance them"
    )


def _number(said: Mapping[str, str], name: str) -> int:
    value = said.get(name, "")
    return int(value) if value.isdecimal() else 0


def _values(flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The flags that matter here, each with its value."""
    for index, flag in enumerate(flags):
        name, has_value, value = flag.partition("=")
        name = SHORT.get(name, name.replace("_", "-"))
        if name in FLAGS or name in (REVISION, RANK, DATA_PARALLEL, LOCAL, FIRST):
            yield name, value if has_value else flags[index + 1] if index + 1 < len(flags) else ""

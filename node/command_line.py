"""A node's command line: a file with one table, [node], or a flag for every key of it, or both (flags win).

prfaas node -c configs/hosts/east-p0.toml
prfaas node --engine vllm --model models/llama --role prefill [-- any vLLM flag]
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, replace
from pathlib import Path
from typing import Any, Final

from node.config import CLUSTER_KINDS, ENGINES, ROLES, TRANSPORTS, NodeConfig, load_node_config, node_config
from node.errors import NodeConfigError
from transport.control.settings import mapped

# Of a node without a file: alone, it serves whole requests; of a PrfaaS cluster it prefills.
DEFAULT_KIND: Final = "pd"
DEFAULT_ROLES: Final = {"pd": "decode", "prfaas": "prefill"}
CHOICES: Final = {"cluster_kind": CLUSTER_KINDS, "role": ROLES, "engine": ENGINES, "transport": TRANSPORTS}
FILE_ONLY: Final = ("engine_args", "egress_bytes_per_s", "etcd", "rdma_devices")
END_OF_OURS: Final = "--"


def split_engine_args(argv: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Our arguments, and after `--` the engine's. (argparse hands some of the latter to us.)"""
    if END_OF_OURS not in argv:
        return list(argv), ()
    at = list(argv).index(END_OF_OURS)
    return list(argv[:at]), tuple(argv[at + 1 :])


def add_node_arguments(parser: argparse.ArgumentParser, kind_of_cluster: str = DEFAULT_KIND) -> None:
    """Adds `-c` and the flags of all keys to `parser`, whose nodes are of that kind unless they say otherwise."""
    parser.add_argument(
        "-c", "--config", type=Path, metavar="FILE.toml", help="configuration with one table, [node]; flags win over it"
    )
    defaults = {
        "node_id": "CLUSTER-ROLE",
        "cluster": "local",
        "cluster_kind": kind_of_cluster,
        "role": "decode, in a PrfaaS cluster prefill",
    }
    keys = parser.add_argument_group("keys of [node]; docs/reference/node.md explains each")
    for field in fields(NodeConfig):
        if field.name in FILE_ONLY:
            continue
        flag = f"--{field.name.replace('_', '-')}"
        if field.type is bool:
            keys.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=_default(field, defaults))
        else:
            numbers: dict[Any, Any] = {float: float, int: _whole, int | None: _whole}
            kind = numbers.get(field.type, str)
            keys.add_argument(
                flag,
                type=kind,
                choices=CHOICES.get(field.name),
                metavar=_metavar(field.name),
                help=_default(field, defaults),
            )


def config_from(arguments: argparse.Namespace, engine_args: Sequence[str] = ()) -> NodeConfig:
    """The configuration that the command line stands for. Raises NodeConfigError."""
    given = {f.name: getattr(arguments, f.name) for f in fields(NodeConfig) if f.name not in FILE_ONLY}
    flags = {key: value for key, value in given.items() if value is not None}
    if arguments.config is not None:
        config = load_node_config(arguments.config)
        flags = {key: _number_or_text(key, value) for key, value in flags.items()}
        with mapped(NodeConfigError):
            return replace(config, **flags, engine_args=(*config.engine_args, *engine_args))
    if not flags:
        raise NodeConfigError("give a file with -c, or at least --model")
    table = {"cluster": "local", "cluster_kind": DEFAULT_KIND} | {
        key: _number_or_text(key, value) for key, value in flags.items()
    }
    table.setdefault("role", DEFAULT_ROLES[table["cluster_kind"]])
    table.setdefault("node_id", f"{table['cluster']}-{table['role']}")
    return node_config({**table, "engine_args": list(engine_args)}, "arguments")


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number; sizes are in bytes") from None


def _number_or_text(key: str, value: Any) -> Any:
    """`connections` is a number or a word."""
    return int(value) if key == "connections" and value.isdecimal() else value


def _default(field: "Field[Any]", defaults: Mapping[str, str]) -> str:
    """What `--help` says of a flag: the value without it."""
    if field.name == "model":
        return "needed, here or in the file"
    default = defaults.get(field.name, field.default)
    if isinstance(default, bool):
        return f"default: {str(default).lower()}"
    return "default: not set" if default is MISSING or default in ("", None) else f"default: {default}"


def _metavar(key: str) -> str | None:
    return None if key in CHOICES else key.rpartition("_")[2].upper()

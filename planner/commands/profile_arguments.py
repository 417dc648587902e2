"""Arguments of `prfaas-plan profile`."""

import argparse
from pathlib import Path
from typing import Final

from planner.commands.argument_types import above_zero, at_least_one, not_negative

DTYPES: Final = ("bfloat16", "float16", "float32", "fp8")


def to_profile(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "action", choices=["show", "check", "calibrate", "import-aic", "from-config"],
        help="print it, compare it with measured points, fit it to them, import one from aiconfigurator, or make one from "
        "config.json and benchmarks",
    )  # fmt: skip
    command.add_argument("profile", type=Path, help="profile file (JSON); from-config: config.json, or its folder")
    command.add_argument(
        "--hardware", metavar="NAME",
        help="name of the prefill curve (calibrate, import-aic, from-config; default there: the GPU and how many)",
    )  # fmt: skip
    command.add_argument(
        "--points", type=Path, metavar="FILE.csv", help="measured times: tokens,seconds (check, calibrate)"
    )
    command.add_argument("--model-path", metavar="NAME", help="model name or directory for aiconfigurator (import-aic)")
    command.add_argument(
        "--system", default="h200_sxm", metavar="NAME",
        help="aiconfigurator's name of the hardware (import-aic; default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="profile file to write (calibrate, import-aic, from-config)"
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    _measured(command.add_argument_group("from-config: hardware and measurements"))
    _by_hand(command.add_argument_group("from-config: what config.json does not say"))


def _measured(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--benchmark", type=Path, action="append", default=[], metavar="FILE",
        help="result of vLLM's bench serve or bench sweep, SGLang's bench_serving, GuideLLM or aiconfigurator; may be repeated",
    )  # fmt: skip
    group.add_argument("--gpu", metavar="NAME", help="GPU of the instance, such as H200")
    group.add_argument(
        "--gpus", type=at_least_one, default=8, metavar="N", help="GPUs of an instance (default: %(default)s)"
    )
    group.add_argument(
        "--gpu-memory-gb", type=above_zero, metavar="GB", help="memory of a GPU that is not known by name (10^9 bytes)"
    )
    group.add_argument(
        "--gpu-tflops", type=above_zero, metavar="TFLOPS", help="peak of a GPU with the weights' type, without sparsity"
    )
    group.add_argument(
        "--max-running", type=at_least_one, metavar="N",
        help="requests that decode at once (default: the most that were measured)",
    )  # fmt: skip
    group.add_argument(
        "--add-to", type=Path, metavar="FILE", help="profile of the same model that gets this hardware as well"
    )


def _by_hand(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--kv-dtype", choices=DTYPES, help="type of KVCache (default: the model's)")
    group.add_argument(
        "--state-dtype", choices=DTYPES, help="type of recurrent states (default: the model's, or float32)"
    )
    group.add_argument(
        "--weights-gb", type=above_zero, metavar="GB", help="all weights (default: from the configuration)"
    )
    group.add_argument(
        "--kv-copies", type=above_zero, metavar="N",
        help="copies of KVCache over the GPUs of an instance (default: GPUs per KV head; a latent is one head)",
    )  # fmt: skip
    group.add_argument("--family", metavar="NAME", help="read an unknown model_type as this one, such as llama")
    group.add_argument(
        "--kv-bytes-per-token",
        type=not_negative,
        metavar="B",
        help="of all layers that keep every token, instead of config.json",
    )
    group.add_argument(
        "--state-bytes", type=not_negative, metavar="B", help="of all states and windows, whatever the length"
    )

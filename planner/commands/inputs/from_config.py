"""`prfaas-plan profile from-config`: a profile of a model's config.json and of results of benchmarks."""

import argparse
from dataclasses import replace
from typing import Any

from planner.commands.inputs.show_profile import memory_rows, origins
from planner.commands.rendering.output import emit, remark, write
from planner.commands.rendering.text import table
from planner.errors import InputError
from planner.model.profile import ModelProfile, parse_profile
from planner.model.reading import named, read_json
from planner.profiles.draft import ByHand, Instance, added_to, drafted, known_model
from planner.profiles.gpus import Gpu, gpu_named
from planner.profiles.results.read import read_runs


def run_from_config(args: argparse.Namespace) -> int:
    """Raises InputError."""
    hand = ByHand(
        family=args.family, kv_dtype=args.kv_dtype, state_dtype=args.state_dtype, bytes_per_token=args.kv_bytes_per_token,
        fixed_bytes=args.state_bytes, weights_gb=args.weights_gb, kv_copies=args.kv_copies, max_running=args.max_running,
    )  # fmt: skip
    instance = _instance(args)
    model = known_model(args.profile, hand)
    runs = [run for path in args.benchmark for run in read_runs(path)]
    document = drafted(model, instance, runs, hand)
    if args.add_to is not None:
        with named(f"profile {args.add_to}"):
            document = added_to(read_json(args.add_to), document)
    profile = parse_profile(document)
    if args.output:
        write(args.output, document)
    if args.json:
        emit(document)
    else:
        _print(profile)
    _say_what_is_missing(profile, document)
    return 0


def _instance(args: argparse.Namespace) -> Instance | None:
    gpu = _gpu(args)
    hardware = args.hardware or (f"{gpu.name.lower()}x{args.gpus}" if gpu is not None else None)
    if hardware is None:
        if args.benchmark:
            raise InputError("--gpu: missing; times belong to some hardware: give --gpu NAME, or --hardware NAME")
        return None
    return Instance(hardware=hardware, gpus=args.gpus, gpu=gpu)


def _gpu(args: argparse.Namespace) -> Gpu | None:
    """A known one, with what is said by hand of it; or one that is known by hand alone."""
    tflops, memory_gb = args.gpu_tflops, args.gpu_memory_gb
    if args.gpu is None and memory_gb is None:
        return None
    if memory_gb is not None:
        unbounded = float("inf") if tflops is None else tflops
        name = args.gpu or "GPU"
        return Gpu(name=name, memory_bytes=memory_gb * 1e9, tflops_16=unbounded, tflops_8=unbounded, is_known=False)
    gpu = gpu_named(args.gpu)
    return gpu if tflops is None else replace(gpu, tflops_16=tflops, tflops_8=tflops, tflops_4=tflops)


def _print(profile: ModelProfile) -> None:
    print(profile.model)
    kv = profile.kv_size()
    rows: list[dict[str, Any]] = [
        {"tokens": tokens, "S_kv_MiB": kv(tokens) / 2**20} for tokens in (1_000, 8_000, 32_000, 128_000)
    ]
    for hardware, curve in profile.prefill.items():
        low, high = curve.valid_tokens
        for row in rows:
            row[f"T_prefill_s {hardware}"] = curve(row["tokens"]) if low <= row["tokens"] <= high else None
    print(table(rows, list(rows[0])))
    if profile.memory:
        memory = memory_rows(profile)
        print(table(memory, list(memory[0])))
    print(origins(profile))


def _say_what_is_missing(profile: ModelProfile, document: dict[str, Any]) -> None:
    if "prefill" not in document:
        remark(
            "no times: give --benchmark FILE and --gpu NAME, or calibrate; a site needs a prefill curve of each hardware"
        )
    elif "decode" not in document:
        remark("no decode times: no run had answers of two tokens or more; a PD cluster needs them")
    if "memory" not in document:
        remark("no memory: give --gpu NAME, and --weights-gb where the layers are not known")

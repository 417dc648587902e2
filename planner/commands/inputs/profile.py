"""`prfaas-plan profile`: make, show, check, calibrate or import profiles."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from planner.commands.inputs.from_config import run_from_config
from planner.commands.inputs.show_profile import memory_rows, origin_of, origins
from planner.commands.rendering.output import emit, write
from planner.commands.rendering.text import table
from planner.errors import InputError
from planner.model.profile import ModelProfile, calibrate, dump_curve, load_profile
from planner.model.reading import SECONDS, TOKENS, Range, named, read_columns, read_json
from planner.model.throughput import kv_throughput
from planner.profiles.aiconfigurator import import_curve

MEASURED: Final = Range(1e-9, SECONDS.high, "seconds")  # no prefill takes no time


def _points(path: Path | None) -> list[tuple[float, float]]:
    if path is None:
        raise InputError("points: missing; give --points CSV with columns tokens,seconds")
    with named(f"points {path}"):
        rows = read_columns(path, {"tokens": TOKENS, "seconds": MEASURED})
    return [(tokens, seconds) for tokens, seconds in rows]


def run(args: argparse.Namespace) -> int:
    actions = {
        "show": _profile_show, "check": _profile_check, "calibrate": _profile_calibrate, "import-aic": _profile_import,
        "from-config": run_from_config,
    }  # fmt: skip
    return actions[args.action](args)


def _profile_show(args: argparse.Namespace) -> int:
    profile = load_profile(args.profile)
    quoted = dict(profile.kv_throughput_gbps)
    rows: list[dict[str, Any]] = []
    for hardware, curve in profile.prefill.items():
        for tokens in (1_000, 8_000, 32_000, 128_000):
            size = profile.kv(tokens) if profile.kv else None
            rows.append(
                {
                    "hardware": hardware,
                    "tokens": tokens,
                    "T_prefill_s": curve(tokens),
                    "S_kv_MiB": size / 2**20 if size else None,
                    "kv_throughput_gbps": float(kv_throughput(size, curve(tokens))) * 8e-9 if size else None,
                    "quoted_gbps": quoted.get(tokens) if hardware == profile.kv_throughput_hardware else None,
                }
            )
    found = origin_of(profile)
    memory = memory_rows(profile)
    if args.json:
        origin = {
            "provenance": {what: text for what, (text, _) in found.items()},
            "error": {what: error for what, (_, error) in found.items()},
        }  # fmt: skip
        emit({"model": profile.model, "rows": rows, "quoted_gbps": quoted, "memory": memory} | origin)
        return 0
    print(f"{profile.model}\n{profile.notes}".rstrip())
    if rows:
        columns = ["hardware", "tokens", "T_prefill_s", "S_kv_MiB", "kv_throughput_gbps", "quoted_gbps"]
        print(table(rows, columns))
    elif quoted:
        print(table([{"tokens": n, "quoted_gbps": g} for n, g in quoted.items()], ["tokens", "quoted_gbps"]))
    if memory:
        print(table(memory, list(memory[0])))
    print(origins(profile))
    return 0


def _hardware(args: argparse.Namespace, profile: ModelProfile) -> str:
    """The hardware that was asked for, or the first one that is profiled."""
    return str(args.hardware or next(iter(profile.prefill), "any hardware"))


def _raw(path: Path) -> dict[str, Any]:
    with named(f"profile {path}"):
        return read_json(path)


def _residuals(points: Sequence[tuple[float, float]], curve: Callable[[float], float]) -> list[dict[str, float]]:
    return [
        {"tokens": n, "measured_s": s, "profile_s": curve(n), "error_s": curve(n) - s, "error": curve(n) / s - 1}
        for n, s in points
    ]


def _profile_check(args: argparse.Namespace) -> int:
    profile = load_profile(args.profile)
    if args.points is None:
        print(f"{profile.model}: readable; prefill {', '.join(profile.prefill) or 'none'}")
        print(origins(profile))
        return 0
    rows = _residuals(_points(args.points), profile.prefill_on(_hardware(args, profile)))
    emit(rows) if args.json else print(table(rows, list(rows[0])))
    return 0


def _profile_calibrate(args: argparse.Namespace) -> int:
    profile = load_profile(args.profile)
    hardware = _hardware(args, profile)
    points = _points(args.points)
    result = calibrate(profile.prefill_on(hardware), points)
    rows = _residuals(points, result.curve)
    if args.output:
        raw = _raw(args.profile)
        raw["prefill"][hardware] = dump_curve(result.curve)
        write(args.output, raw)
    if args.json:
        emit({"hardware": hardware, "curve": dump_curve(result.curve), "residuals": rows})
        return 0
    print(f"{hardware}: overhead_s={result.curve.overhead_s:.4f} scale={result.curve.scale:.4f}")
    print(table(rows, list(rows[0])))
    return 0


def _profile_import(args: argparse.Namespace) -> int:
    raw = _raw(args.profile)
    curve = import_curve(args.model_path, args.system)
    hardware = args.hardware or args.system
    raw.setdefault("prefill", {})[hardware] = dump_curve(curve)
    if args.output:
        write(args.output, raw)
    emit(dump_curve(curve))
    return 0

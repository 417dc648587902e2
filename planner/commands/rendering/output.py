"""Results to stdout or a file, remarks to stderr."""

import csv
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from planner.errors import InputError
from planner.solve.plan import Plan


def remark(text: str) -> None:
    print(text, file=sys.stderr)


def emit(value: Any) -> None:
    print(_json(value))


def write(path: Path, value: Any) -> None:
    path.write_text(_json(value) + "\n")


def check_output(path: Path) -> None:
    """Before the work whose result is written there. Raises InputError for a file that cannot be written."""
    if path.is_dir():
        raise InputError(f"--output {path}: is a folder; name a file")
    if not path.parent.is_dir():
        raise InputError(f"--output {path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InputError(f"--output {path}: cannot be written by this user")


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, default=_number)


def _number(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{value!r} has no JSON form")


def write_csv(file: Any, rows: Sequence[dict[str, Any]]) -> None:
    writer = csv.DictWriter(file, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)


def warn(plan: Plan) -> None:
    for warning in plan.warnings:
        remark(f"warning: {warning}")

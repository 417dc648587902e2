"""Results to stdout or a file, remarks to stderr."""

import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from planner.solve.plan import Plan


def remark(text: str) -> None:
    print(text, file=sys.stderr)


def emit(value: Any) -> None:
    print(_json(value))


def write(path: Path, value: Any) -> None:
    path.write_text(_json(value) + "\n")


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

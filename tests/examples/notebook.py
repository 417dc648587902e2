"""Runs a notebook's code without Jupyter: `python -m tests.examples.notebook FILE` writes what its cells print into it."""

import contextlib
import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read(file: Path) -> dict[str, Any]:
    """A notebook of format 4. Raises ValueError if it is of another one."""
    notebook: dict[str, Any] = json.loads(file.read_text())
    if notebook["nbformat"] != 4:
        raise ValueError(f"{file}: format {notebook['nbformat']}, not 4")
    return notebook


def printed(notebook: Mapping[str, Any]) -> list[str]:
    """What each code cell prints, all of them run in order in one namespace."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    for number, cell in enumerate(code_cells(notebook), 1):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), namespace)
        outputs.append(out.getvalue())
    return outputs


def stored(notebook: Mapping[str, Any]) -> list[str]:
    """What each code cell printed when the notebook was saved."""
    return ["".join(line for output in cell["outputs"] for line in output["text"]) for cell in code_cells(notebook)]


def code_cells(notebook: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def main(file: Path) -> None:
    notebook = read(file)
    for number, (cell, text) in enumerate(zip(code_cells(notebook), printed(notebook), strict=True), 1):
        cell["execution_count"] = number
        lines = text.splitlines(keepends=True)
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
    file.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

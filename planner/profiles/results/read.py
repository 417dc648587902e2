"""Reads a benchmark's result, whichever tool wrote it: a JSON file, one with a result on each line, CSV, or a folder of them."""

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from planner.model.reading import json_rows, named, open_text, read_text
from planner.profiles.results.estimates import estimated_run, is_estimate
from planner.profiles.results.guidellm import guidellm_runs, is_guidellm
from planner.profiles.results.run import BenchmarkRun
from planner.profiles.results.serving import is_serving, serving_run
from transport.control.settings import SettingsError, require_table

SUMMARY: Final = "summary.json"  # of a sweep: what its runs' files say, once more
SHAPES: Final = (
    "vLLM's `bench serve --save-result` and `bench sweep` (total_input_tokens, median_ttft_ms), SGLang's bench_serving (the "
    "same, one on each line), GuideLLM's JSON (benchmarks) and aiconfigurator's CSV (isl, osl, concurrency, ttft, tpot)"
)


def read_runs(path: Path) -> tuple[BenchmarkRun, ...]:
    """Every run of a result. Raises InputError naming the file, the place in it, and the field."""
    with named(f"benchmark {path}"):
        files = _result_files(path) if path.is_dir() else [path]
        runs = [run for file in files for run in _runs_of(file, "" if file == path else f"{file.relative_to(path)}")]
        if not runs:
            raise SettingsError(f"no result in it; known are {SHAPES}")
        return tuple(runs)


def _result_files(folder: Path) -> list[Path]:
    files = sorted(each for each in folder.rglob("*.json*") if each.is_file() and each.name != SUMMARY)
    if not files:
        raise SettingsError("no *.json in that folder")
    return files


def _runs_of(path: Path, inside: str) -> Iterator[BenchmarkRun]:
    """`inside` a folder of results."""
    for place, table in _tables(path):
        where = ", ".join(filter(None, (inside, place)))
        try:
            yield from _runs_in(table, ", ".join(filter(None, (path.name, place))))
        except SettingsError as exc:
            raise SettingsError(f"{where}: {exc}" if where else str(exc)) from exc


def _tables(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The objects of a file, and where they are in it."""
    if ".csv" in path.suffixes:
        with open_text(path) as text:
            try:
                yield from ((f"row {at}", row) for at, row in enumerate(csv.DictReader(text), 1))
            except csv.Error as exc:
                raise SettingsError(f"not CSV: {exc}") from exc
        return
    said = read_text(path)
    try:
        whole = json.loads(said)
    except ValueError:
        yield from ((f"line {line}", row) for line, row in json_rows(said.splitlines(keepends=True)))
        return
    if isinstance(whole, list):
        yield from ((f"[{at}]", require_table(table, f"[{at}]")) for at, table in enumerate(whole))
        return
    yield "", require_table(whole, "the file")


def _runs_in(table: Mapping[str, Any], source: str) -> Iterator[BenchmarkRun]:
    if is_guidellm(table):
        yield from guidellm_runs(table, source)
    elif is_serving(table):
        yield serving_run(table, source)
    elif is_estimate(table):
        yield estimated_run(table, source)
    else:
        fields = ", ".join(str(key) for key in list(table)[:8]) or "none"
        raise SettingsError(f"fields {fields}: no result of a benchmark that is known; known are {SHAPES}")

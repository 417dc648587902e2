"""Parts B, C and D: two vLLM servers on one device behind a gateway, the first prefilling for the second.

B takes each model, several at a time. D takes the servers of the first one. C comes last and alone, as it measures times.
On a CPU the same rounds run as a dry run with small models: tokens and bytes are judged, times are not.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from prfaas.errors import PrfaasError
from tests.e2e.harness import Bench
from tests.gpu.models import ModelWriter
from tests.gpu.results import Report, judged, skipped
from tests.gpu.rounds import equality, killed
from tests.gpu.settings import ENVIRONMENT, STOP_S, Setting, document, why_not
from tests.gpu.times import beside, times

LATE_S: Final = 5.0  # for a node to say why its engine is not ready
LOG_TAIL: Final = 1000
ROUNDS: Final = {"B": equality, "D": killed}


def run_parts(setting: Setting, wanted: Sequence[str], report: Report) -> None:
    """Those of B, C and D that are wanted."""
    if reason := why_not(setting):
        for part in wanted:
            report.add(skipped(part, reason))
        return
    os.environ.update({key: value for key, value in ENVIRONMENT.items() if key not in os.environ})
    of_models = {"B": setting.models, "D": setting.models[:1]}
    equal = [name for name in setting.models if any(name in of_models[part] for part in wanted if part in of_models)]
    for name in equal:
        for part in (part for part in "BD" if part in wanted and name in of_models[part]):
            report.awaits(part, name)
    if "C" in wanted:
        report.awaits("C", setting.timed_model)
    names = [*equal, *([setting.timed_model] if "C" in wanted and setting.timed_model not in equal else [])]
    with tempfile.TemporaryDirectory(prefix="prfaas-gpu-") as scratch, ModelWriter(names, Path(scratch)) as writer:

        def run(name: str) -> None:
            of_model(
                name, setting, writer, [part for part in "BD" if part in wanted and name in of_models[part]], report
            )

        with ThreadPoolExecutor(setting.side_by_side) as pool:
            list(pool.map(run, equal))
        if "C" in wanted:
            of_times(setting, writer, report)


def of_model(name: str, setting: Setting, writer: ModelWriter, parts: Sequence[str], report: Report) -> None:
    """Parts over one pair of servers, in order. What ends one of them, or the start, is a reason."""
    waiting = list(parts)
    if reason := _shortage(setting, waiting[0], report):
        report.add(skipped(waiting[0], reason, name))
        return
    report.say(f"{name}: starting two servers")
    try:
        model = writer.path_of(name, report.left_s())
        folder = Path(tempfile.mkdtemp(dir=model.parent))
        start_s = _start_s(setting, report)
        with started(document(model, setting, start_s=start_s), model, folder, start_s) as bench:
            report.say(f"{name}: both are ready")
            while waiting and not (reason := _shortage(setting, waiting[0], report, is_ready=True)):
                part = waiting[0]
                try:
                    found = bench.run(ROUNDS[part](bench, setting, name), timeout_s=_rounds_s(report))
                except Exception as error:  # of vLLM, gRPC or HTTP: the other parts are not concerned
                    found = [_said(error)], {}
                report.add(judged(waiting.pop(0), *found, model=name))
        for part in waiting:
            report.add(skipped(part, reason, name))
    except Exception as error:  # of vLLM, gRPC or HTTP: the other parts are not concerned
        for part in waiting or ["end"]:
            report.add(judged(part, [_said(error)], {}, model=name))


@contextlib.contextmanager
def started(nodes: dict[str, Any], model: Path, folder: Path, start_s: float) -> Iterator[Bench]:
    """A pair of servers. Raises RuntimeError with the end of what they logged where they are not ready in time."""
    with contextlib.ExitStack() as stack:
        try:
            bench = stack.enter_context(Bench(nodes, model, folder, start_s=start_s + LATE_S))
        except (PrfaasError, TimeoutError) as error:
            logs = "; ".join(f"{log.name}: {_end_of(log)}" for log in sorted(folder.glob("*-engine.log")))
            raise RuntimeError(f"not ready within {start_s:.0f} s: {str(error) or 'it is late'}; {logs}") from error
        yield bench


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-LOG_TAIL:]


def of_times(setting: Setting, writer: ModelWriter, report: Report) -> None:
    """Part C: every server at once, then one after the other is asked."""
    name = setting.timed_model
    if reason := _shortage(setting, "C", report):
        report.add(skipped("C", reason, name))
        return
    report.say(f"{name}: starting two servers, and others to compare them with")
    try:
        model = writer.path_of(name, report.left_s())
        folder = Path(tempfile.mkdtemp(dir=model.parent))
        start_s = _start_s(setting, report)
        nodes = document(model, setting, start_s=start_s, timed=True)
        with beside(model, setting, folder) as (plain, pair), started(nodes, model, folder, start_s) as bench:
            report.say(f"{name}: both are ready")
            found = bench.run(times(bench, setting, plain, pair), timeout_s=_rounds_s(report))
    except Exception as error:  # of vLLM, gRPC or HTTP: the other parts are not concerned
        found = [_said(error)], {}
    report.add(judged("C", *found, model=name))


def _shortage(setting: Setting, part: str, report: Report, *, is_ready: bool = False) -> str:
    needed_s = setting.needed_s.get(part, 0.0)
    return report.budget.shortage(needed_s / 3 if is_ready and part == "B" else needed_s, time.monotonic())


def _start_s(setting: Setting, report: Report) -> float:
    return max(1.0, min(setting.start_s, report.left_s() - STOP_S))


def _rounds_s(report: Report) -> float:
    return max(1.0, report.left_s() - STOP_S)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"

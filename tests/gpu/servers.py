"""Parts B, C and D: two vLLM servers on one device behind a gateway, the first prefilling for the second.

On a CPU the same rounds run as a dry run with a tiny model: tokens and bytes are judged, times are not.
"""

import asyncio
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import aiohttp
import torch

from benchmarks.vllm.pd import ServerProcess, without
from engine.vllm.launch import VllmOptions, environment, server_command
from hybrid_cache.layout.layout import ModelLayout
from hybrid_cache.layout.transfers import transfer_ranges
from prfaas.errors import PrfaasError
from tests.e2e.harness import Bench
from tests.gpu.models import GEOMETRIES, LEFT_OUT, written
from tests.gpu.results import PartResult, judged
from tests.transport.path.ports import free_port

NAME = "tiny"
START_S = 300.0
ANSWER_S = 120.0
POLL_S = 0.2
LEAST_PREFILL = 0.97  # of a plain server's rate
MOST_ITL_P50, MOST_ITL_P99 = 1.03, 1.10  # of a plain server's
LEAST_OVERLAP = 0.9  # of bytes that leave before the prefill ends, at the longest prompt
ENDINGS: Final = (PrfaasError, RuntimeError, OSError, ValueError, aiohttp.ClientError)


@dataclass(frozen=True)
class Setting:
    """What a device is asked."""

    device: str
    models: tuple[str, ...]
    lengths: tuple[int, ...]
    timed_lengths: tuple[int, ...]
    rounds: int
    tokens: int
    max_model_len: int
    chunk_tokens: int | None
    flags: tuple[str, ...]
    cache_bytes: int

    @property
    def is_dry(self) -> bool:
        return self.device == "cpu"


CUDA = Setting(
    device="cuda",
    models=tuple(GEOMETRIES),
    lengths=(300, 1025, 4096, 9000),
    timed_lengths=(2048, 8192, 30_000),
    rounds=5,
    tokens=64,
    max_model_len=32_768,
    chunk_tokens=None,
    flags=("--dtype", "float32", "--gpu-memory-utilization", "0.28"),
    cache_bytes=16 << 30,
)
CPU = Setting(
    device="cpu",
    models=("llama",),
    lengths=(300, 1025),
    timed_lengths=(600,),
    rounds=2,
    tokens=8,
    max_model_len=4096,
    chunk_tokens=256,
    flags=("--dtype", "float32", "--num-gpu-blocks-override", "128"),
    cache_bytes=128 << 20,
)


def why_not(device: str) -> str:
    """What a device lacks for these parts; empty if it is there."""
    if find_spec("vllm") is None:
        return "needs vLLM"
    if device == "cuda" and not torch.cuda.is_available():
        return f"needs PyTorch with CUDA and a GPU: torch {torch.__version__} sees none"
    return ""


def document(model: Path, setting: Setting) -> dict[str, Any]:
    """Two nodes with a server each; the PD cluster has none that prefills."""
    node: dict[str, Any] = {
        "engine": "vllm",
        "engine_args": list(setting.flags),
        "max_model_len": setting.max_model_len,
        "cache_bytes": setting.cache_bytes,
        "transport": "tcp",
    }
    if setting.chunk_tokens is not None:
        node["chunk_tokens"] = setting.chunk_tokens
    return {
        "model": {"path": str(model), "name": NAME},
        "gateway": {"port": 0, "threshold_tokens": 200},
        "node": node,
        "clusters": [
            {"name": "east", "kind": "prfaas", "nodes": [{"node_id": "far", "role": "prefill"}]},
            {"name": "west", "kind": "pd", "nodes": [{"node_id": "decode0", "role": "decode"}]},
        ],
    }


@dataclass(frozen=True)
class TimedAnswer:
    """An answer's tokens and when each event with some came, from the question on."""

    tokens: list[int]
    came_s: list[float]

    @property
    def ttft_s(self) -> float:
        return self.came_s[0]

    @property
    def intervals_s(self) -> list[float]:
        return [after - before for before, after in zip(self.came_s, self.came_s[1:], strict=False)]


async def timed(
    session: aiohttp.ClientSession, url: str, prompt: Sequence[int], tokens: int, name: str, **extra: Any
) -> TimedAnswer:
    body = {
        "model": NAME, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "return_token_ids": True,
    }  # fmt: skip
    began_s, found, came_s = time.monotonic(), list[int](), list[float]()
    limit = aiohttp.ClientTimeout(total=ANSWER_S)
    call = session.post(f"{url}/v1/completions", json=body | extra, headers={"x-request-id": name}, timeout=limit)
    async with call as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            ids = [token for choice in event.get("choices") or () for token in choice.get("token_ids") or ()]
            if ids:
                found += ids
                came_s.append(time.monotonic() - began_s)
    return TimedAnswer(found, came_s)


async def alone(bench: Bench, prompt: Sequence[int], tokens: int) -> list[int]:
    """By the decode node's server: with a salt that no gateway gave, the connector leaves a prompt alone."""
    url = bench.node("decode0").engine_url
    return (await timed(bench.session, url, prompt, tokens, bench.name(), cache_salt=uuid.uuid4().hex)).tokens


async def layout_bytes(bench: Bench, prompt: Sequence[int]) -> int:
    """What of a prompt moves, by its layout."""
    layout = ModelLayout.from_json((await bench.describe("decode0")).layout_json)
    return sum(size * count for size, count in transfer_ranges(layout, len(prompt) - 1, 0).sizes(layout))


async def equality(bench: Bench, setting: Setting) -> tuple[list[str], dict[str, Any]]:
    """Part B for one model: tokens of two servers are those of one, and what crosses is what the layout says."""
    wrong, rows = [], []
    for number, length in enumerate(setting.lengths):
        prompt, name = bench.prompt(length, seed=1000 + number), bench.name()
        answer = await timed(bench.session, bench.system.api_url, prompt, setting.tokens, name)
        record, expected = await bench.record(name), await layout_bytes(bench, prompt)
        reference = await alone(bench, prompt, setting.tokens)
        same = next(
            (at for at, (a, b) in enumerate(zip(answer.tokens, reference, strict=False)) if a != b), len(reference)
        )
        row = {"tokens": length, "equal": same, "of": len(reference), "bytes": record["bytes"], "layout": expected}
        rows.append(row | {"route": record["route"], "fallbacks": record["fallbacks"]})
        if answer.tokens != reference or len(reference) != setting.tokens:
            wrong.append(f"{length} tokens: the answers part at token {same}")
        if record["fallbacks"] or record["bytes"] != expected:
            wrong.append(f"{length} tokens: {record['bytes']} of {expected} bytes, fallbacks {record['fallbacks']}")
    return wrong, {"prompts": rows}


async def times(bench: Bench, setting: Setting, plain: str) -> tuple[list[str], dict[str, Any]]:
    """Part C: the pair beside a plain server, in turn."""
    rows, reasons = [], []
    for length in setting.timed_lengths:
        ours, theirs, overlaps = list[TimedAnswer](), list[TimedAnswer](), list[float]()
        for number in range(-1, setting.rounds):  # the first opens connections, and does not count
            prompt, name = bench.prompt(length, seed=5000 + 100 * length + number), bench.name()
            answer = await timed(bench.session, bench.system.api_url, prompt, setting.tokens, name)
            reference = await timed(bench.session, plain, prompt, setting.tokens, bench.name())
            record = await bench.record(name)
            if record["fallbacks"]:
                reasons.append(f"{length} tokens: fallbacks {record['fallbacks']}")
            if number >= 0:
                ours.append(answer)
                theirs.append(reference)
                overlaps.append(record["overlap"] or 0.0)
        row = {"tokens": length, **compared(ours, theirs), "overlap": statistics.median(overlaps)}
        rows.append(row)
        if not setting.is_dry:
            reasons += missed(row, is_longest=length == max(setting.timed_lengths))
    return reasons, {"prompts": rows, "nixl": "left out: benchmarks.vllm.pd measures it"}


def compared(ours: Sequence[TimedAnswer], theirs: Sequence[TimedAnswer]) -> dict[str, float]:
    """Medians of first tokens; of the intervals between tokens, ours over theirs."""
    ttft_s, plain_s = (statistics.median(each.ttft_s for each in answers) for answers in (ours, theirs))
    mine, other = (sorted(i for each in answers for i in each.intervals_s) for answers in (ours, theirs))
    found = {"ttft_s": ttft_s, "plain_ttft_s": plain_s, "prefill": plain_s / ttft_s}
    for name, share in (("itl_p50", 0.5), ("itl_p99", 0.99)) if mine and other else ():
        at = [values[min(len(values) - 1, int(share * len(values)))] for values in (mine, other)]
        found |= {f"{name}_s": at[0], f"plain_{name}_s": at[1], name: at[0] / at[1]}
    return {key: round(value, 5) for key, value in found.items()}


def missed(row: dict[str, Any], *, is_longest: bool) -> list[str]:
    """Which limits a row of part C does not keep."""
    found = [f"prefill at {row['prefill']} of a plain server's rate"] if row["prefill"] < LEAST_PREFILL else []
    for name, limit in (("itl_p50", MOST_ITL_P50), ("itl_p99", MOST_ITL_P99)):
        if name not in row:
            found.append(f"{name} is not known: an answer came at once")
        elif row[name] > limit:
            found.append(f"{name} {row[name]} of a plain server's")
    if is_longest and row["overlap"] < LEAST_OVERLAP:
        found.append(f"overlap {row['overlap']}")
    return [f"{row['tokens']} tokens: {each}" for each in found]


async def killed(bench: Bench, setting: Setting) -> tuple[list[str], dict[str, Any]]:
    """Part D: the server that prefills is killed in the middle of a leg; the answer is right, and the next leg is its own."""
    length = max(setting.lengths)
    prompt, name = bench.prompt(length, seed=77), bench.name()
    reference, engine = await alone(bench, prompt, setting.tokens), (await bench.describe("far")).engine_pid
    task = asyncio.create_task(timed(bench.session, bench.system.api_url, prompt, setting.tokens, name))
    await _until(lambda: _is_busy(bench), ANSWER_S)
    os.kill(engine, signal.SIGKILL)
    killed_s = time.monotonic()
    answer, record = await task, await bench.record(name)
    wrong = [] if answer.tokens == reference else ["the answer has other tokens"]
    await _until(lambda: _is_back(bench, engine), START_S)
    figures: dict[str, Any] = {"ready_again_s": round(time.monotonic() - killed_s, 1), "fallbacks": record["fallbacks"]}
    prompt, name = bench.prompt(length, seed=78), bench.name()
    answer = await timed(bench.session, bench.system.api_url, prompt, setting.tokens, name)
    record = await bench.record(name)
    figures["after"] = {"route": record["route"], "bytes": record["bytes"], "fallbacks": record["fallbacks"]}
    if answer.tokens != await alone(bench, prompt, setting.tokens):
        wrong.append("afterwards the answer has other tokens")
    if record["fallbacks"] or not record["bytes"]:
        wrong.append(f"afterwards nothing is prefilled remotely: {record['fallbacks']}")
    return wrong, figures


async def _is_busy(bench: Bench) -> bool:
    load = (await bench.describe("far")).load
    return bool(load.sending or load.running)


async def _is_back(bench: Bench, engine: int) -> bool:
    if (await bench.describe("far")).engine_pid == engine:
        return False
    return await bench.gateway_sees("far") == "ready"


async def _until(holds: Callable[[], Awaitable[bool]], limit_s: float) -> None:
    async with asyncio.timeout(limit_s):
        while True:
            if await holds():
                return
            await asyncio.sleep(POLL_S)


@contextlib.contextmanager
def plain_server(bench: Bench, model: Path, setting: Setting, folder: Path) -> Iterator[str]:
    """A server with the same flags and without our connector. Raises RuntimeError when it does not start."""
    port = free_port()
    options = VllmOptions(
        model=str(model), served_name=NAME, host="127.0.0.1", port=port, agent_socket=folder / "unused.sock", threads=1,
        drain_timeout_s=1.0, chunk_tokens=setting.chunk_tokens, max_model_len=setting.max_model_len,
        vllm_flags=setting.flags,
    )  # fmt: skip
    command = server_command(options, is_cpu=setting.is_dry)
    argv = without(command, "--kv-transfer-config", "--kv-events-config", "--middleware", "--scheduler-cls")
    env = environment(options, os.environ, is_cpu=setting.is_dry)
    server = ServerProcess([sys.executable, *argv], folder / "plain.log", env, talks=False)
    try:
        bench.run(_healthy(f"http://127.0.0.1:{port}/health", server), timeout_s=START_S)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop()


async def _healthy(url: str, server: ServerProcess) -> None:
    async with aiohttp.ClientSession() as session:
        while True:
            server.raise_if_ended()
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(url) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(POLL_S)


Found = tuple[list[str], dict[str, Any]]  # why a part has failed, and its figures
Round = Callable[[Bench, Setting, Path, Path], Found]


def run_parts(device: str, wanted: Sequence[str]) -> list[PartResult]:
    """Those of B, C and D that are wanted. C and D take the first model."""
    if reason := why_not(device):
        return [PartResult(part, "skipped", reason, {}) for part in wanted]
    setting = CPU if device == "cpu" else CUDA
    of_all: dict[str, Any] = {}
    reasons, others = list[str](), list[PartResult]()
    with tempfile.TemporaryDirectory(prefix="prfaas-gpu-") as scratch:
        for number, name in enumerate(setting.models):
            rounds = {part: ROUNDS[part] for part in wanted if part == "B" or number == 0}
            found = with_servers(name, setting, Path(scratch), rounds) if rounds else {}
            if "B" in found:
                why, of_all[name] = found.pop("B")
                reasons += [f"{name}: {each}" for each in why]
            others += [judged(part, *each) for part, each in found.items()]
    equal = [judged("B", reasons, of_all | {"left_out": LEFT_OUT})] if "B" in wanted else []
    return [*equal, *others]


def with_servers(name: str, setting: Setting, scratch: Path, rounds: Mapping[str, Round]) -> dict[str, Found]:
    """Parts over one pair of servers, in order. What ends one of them, or the start, is a reason."""
    found: dict[str, Found] = {}
    folder = Path(tempfile.mkdtemp(dir=scratch))
    try:
        model = written(name, scratch)
        with Bench(document(model, setting), model, folder) as bench:
            for part, run in rounds.items():
                try:
                    found[part] = run(bench, setting, model, folder)
                except ENDINGS as error:
                    found[part] = ([f"{type(error).__name__}: {error}"], {})
    except ENDINGS as error:
        return {part: found.get(part, ([f"{type(error).__name__}: {error}"], {})) for part in rounds}
    return found


def _equal(bench: Bench, setting: Setting, model: Path, folder: Path) -> Found:
    return bench.run(equality(bench, setting), timeout_s=START_S)


def _timed(bench: Bench, setting: Setting, model: Path, folder: Path) -> Found:
    with plain_server(bench, model, setting, folder) as url:
        return bench.run(times(bench, setting, url), timeout_s=START_S)


def _killed(bench: Bench, setting: Setting, model: Path, folder: Path) -> Found:
    return bench.run(killed(bench, setting), timeout_s=2 * START_S)


ROUNDS: Final[Mapping[str, Round]] = {"B": _equal, "C": _timed, "D": _killed}

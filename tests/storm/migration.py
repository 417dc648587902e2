"""`python -m tests.storm.migration --streams 200`: decode nodes are killed under their streams, whose clients do not notice.

Three architectures with tiny real models, two decode nodes each. A batch of streams is asked for, half of them greedy, half of
them sampled by seed, half with prompts that a prefill node computes; when half have had ten tokens (or twenty, to a hundred) one
decode node goes: its engine by SIGKILL, the agent and the engine, or the engine stops without dying. It passes if every
stream has the bytes that it has without a failure, and every stream on that node was taken over. Greedy streams must have the
tokens of a plain transformers.generate. Pauses are a client's longest between two events.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from engine.torch.tiny import build_model
from tests.e2e.harness import Bench, topology_document

ARCHITECTURES: Final = ("kimi_linear", "qwen3_next", "llama")
BATCH: Final = 16
TOKENS: Final = 120
STEP: Final = 10
WAYS: Final = ("engine", "node", "stall")
IDLE_S: Final = 3.0  # of a stream, until its engine counts as stalled
LENGTHS: Final = (60, 90, 450, 700)
READY_S: Final = 120.0
_DATED: Final = re.compile(rb'"(id|created)":("[^"]*"|\d+)')
_CACHED: Final = re.compile(rb'"cached_tokens":\d+')


@dataclass(slots=True)
class Stream:
    """What a client got."""

    name: str
    events: list[bytes] = field(default_factory=list)
    pause_s: float = 0.0  # the longest between two events

    @property
    def told(self) -> list[bytes]:
        """Without what may differ from answer to answer: id, date, what was cached."""
        return [_CACHED.sub(b"", _DATED.sub(b"", event)) for event in self.events]

    @property
    def marks(self) -> set[bytes]:
        """The ids and dates that its events carry: one of each."""
        return {found[0] for event in self.events for found in _DATED.finditer(event)}


@dataclass(slots=True)
class Tally:
    """What became of the streams of one architecture, or of all."""

    killed: int = 0
    streams: int = 0
    wrong: list[str] = field(default_factory=list)
    pauses: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    gaps: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


class Migration:
    """Batches of `batch` streams on one running system, whose decode nodes go in these `ways`, in turn."""

    def __init__(
        self,
        bench: Bench,
        tally: Tally,
        report: Callable[[str], None],
        *,
        batch: int = BATCH,
        ways: Sequence[str] = WAYS,
    ) -> None:
        self._bench = bench
        self._ways = ways
        self._tally = tally
        self._report = report
        self._bodies = [self._body(number) for number in range(batch)]
        self._whole: list[Stream] = []

    async def run(self, wanted: int) -> None:
        """Kills until `wanted` streams have been taken over."""
        await self._bench.system.wait_ready(len(self._bench.system.nodes))
        self._whole = [await self._stream(body, self._bench.name()) for body in self._bodies]
        self._check_reference()
        begun, round_ = self._tally.killed, 0
        while self._tally.killed - begun < wanted:
            after, way = STEP * (1 + round_ % 10), self._ways[round_ % len(self._ways)]
            await self._kill_under_streams(f"decode{round_ % 2}", after, way)
            round_ += 1

    def _body(self, number: int) -> dict[str, Any]:
        sampled = {"temperature": 0} if number % 2 == 0 else {"temperature": 1.0, "seed": number}
        prompt = self._bench.prompt(LENGTHS[number // 2 % len(LENGTHS)], seed=1000 + number)
        return {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, **sampled}

    def _check_reference(self) -> None:
        for body, whole in zip(self._bodies, self._whole, strict=True):
            if body["temperature"] == 0 and tokens_of(whole) != self._bench.expected(body["prompt"], TOKENS):
                self._tally.wrong.append(f"{whole.name}: without a failure its tokens are not those of the reference")

    async def _kill_under_streams(self, node: str, after: int, way: str) -> None:
        reached = asyncio.Semaphore(0)
        streams = [asyncio.create_task(self._stream(body, self._bench.name(), after, reached)) for body in self._bodies]
        for _ in range(len(self._bodies) // 2):
            await reached.acquire()
        await self._kill(node, way)
        ended = await asyncio.gather(*streams)
        taken = 0
        for stream, whole in zip(ended, self._whole, strict=True):
            record = await self._bench.record(stream.name)
            self._tally.streams += 1
            if record["takeovers"]:
                taken += 1
                self._tally.pauses[way].append(stream.pause_s)
                self._tally.gaps[way].append(record["gap_s"])
            if stream.told != whole.told:
                self._tally.wrong.append(f"{stream.name}: {way} of {node} after {after}: {_difference(stream, whole)}")
            elif len(stream.marks) != 2:
                self._tally.wrong.append(f"{stream.name}: more than one id or date: {stream.marks}")
        self._tally.killed += taken
        so_far = f"{len(self._tally.wrong)} wrong so far"
        self._report(f"{way} of {node} after {after} tokens: {taken} of {len(ended)} streams taken over, {so_far}")
        await self._back(node, way)

    async def _kill(self, node: str, way: str) -> None:
        if way == "node":
            await self._bench.kill(node)
            return
        engine = (await self._bench.describe(node)).engine_pid
        os.kill(engine, signal.SIGKILL if way == "engine" else signal.SIGSTOP)

    async def _back(self, node: str, way: str) -> None:
        """The node serves again, and the gateway knows."""
        if way == "stall":
            os.kill((await self._bench.describe(node)).engine_pid, signal.SIGKILL)
        if way == "node":
            await self._bench.start_again(node)

        async def is_back() -> bool:
            return await self._bench.gateway_sees(node) == "ready"

        await asyncio.sleep(0.5)  # it may not know yet that it is gone
        await self._bench.wait_until(is_back, READY_S)

    async def _stream(
        self, body: dict[str, Any], name: str, after: int = 0, reached: asyncio.Semaphore | None = None
    ) -> Stream:
        body = body | {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
        stream, heard_at = Stream(name), None
        url = f"{self._bench.system.api_url}/v1/completions"
        async with self._bench.session.post(url, json=body, headers={"x-request-id": name}) as answer:
            if answer.status != 200:
                self._tally.wrong.append(f"{name}: HTTP {answer.status}")
            async for line in answer.content:
                if not line.strip():
                    continue
                now = time.monotonic()
                if heard_at is not None:
                    stream.pause_s = max(stream.pause_s, now - heard_at)
                heard_at = now
                stream.events.append(line)
                if reached is not None and len(stream.events) == after:
                    reached.release()
        return stream


def tokens_of(stream: Stream) -> list[int]:
    events = [json.loads(event.removeprefix(b"data: ")) for event in stream.events if b"[DONE]" not in event]
    return [token for event in events for choice in event["choices"] for token in choice["token_ids"]]


def _difference(stream: Stream, whole: Stream) -> str:
    for number, (told, wanted) in enumerate(zip(stream.told, whole.told, strict=False)):
        if told != wanted:
            return f"event {number} is {stream.events[number]!r}, not {whole.events[number]!r}"
    return f"{len(stream.events)} events, not {len(whole.events)}"


def document(model: Path) -> dict[str, Any]:
    """The system, as a topology file would say it."""
    described = topology_document(model, threshold=300, decode_nodes=2, chunk_tokens=128)
    described["gateway"]["timeouts"] = {"stream_idle_s": IDLE_S}
    return described


def migrate(arch: str, wanted: int, tally: Tally, report: Callable[[str], None]) -> None:
    """Has `wanted` streams of a model of `arch` taken over."""
    with tempfile.TemporaryDirectory(prefix="prfaas-migration-") as work:
        model = Path(work) / "model"
        build_model(arch, model, report=lambda line: None)
        with Bench(document(model), model, Path(work) / "state") as bench:
            bench.run(Migration(bench, tally, report).run(wanted), timeout_s=3600.0)
            bench.run(bench.wait_idle())


def _figures(seconds: list[float]) -> str:
    return f"median {np.median(seconds):.3f} s, P99 {np.percentile(seconds, 99):.3f} s, {len(seconds)} streams"


def main() -> int:
    """Runs all architectures; 1 if a stream was not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200, help="to be taken over, in all")
    parser.add_argument("--arch", action="append", help=f"instead of {', '.join(ARCHITECTURES)}")
    options = parser.parse_args()
    architectures = tuple(options.arch or ARCHITECTURES)
    tally = Tally()
    for arch in architectures:
        migrate(
            arch,
            -(-options.streams // len(architectures)),
            tally,
            lambda line, arch=arch: print(arch, line, flush=True),
        )
    print(f"{tally.killed} of {tally.streams} streams lost their decode node, {len(tally.wrong)} were wrong")
    for way in tally.pauses:
        print(f"{way}: longest pause {_figures(tally.pauses[way])}")
        print(f"{way}: from the failure to the next bytes {_figures(tally.gaps[way])}")
    for line in tally.wrong[:20]:
        print(f"  {line}", file=sys.stderr)
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

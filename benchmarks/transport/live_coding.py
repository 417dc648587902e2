"""Coding that chooses itself, live:
`python -m benchmarks.transport.live_coding [--json] [--requests N] [--gbps WIDE NARROW WIDE]`.

One PrfaaS node sends to one decode node over a paced line, engines stand in for the case study's model. The same prompts, one
after the other, with lossless compression off and on `auto`, while the line's width changes under the running system: KVCache
leaves as it is computed, then the line is what everybody waits for, then it leaves as it is computed again.

    coded       of the bytes that left, those that were compressed: most on a narrow line, none on a wide one
    saved       by that
    TTFT        mean, in seconds of the model

How small the bytes become is the stand-ins' own: their KVCache is a digest, repeated, which no model's is. What coding makes of
real KVCache says `python -m benchmarks.transport.compression`. Every answer is checked: its tokens follow from the KVCache that
arrived.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import aiohttp
import numpy as np
import tomli_w

from engine.byte_tokenizer import SPECIAL_TOKENS, VOCAB_SIZE
from engine.emulated.emulated import emulated_tokens
from prfaas.demo.client import complete
from prfaas.system.models import ensure_model
from prfaas.system.standin import Scale
from prfaas.system.system import System
from prfaas.system.topology import Topology, parse_topology

PROFILE: Final = Path(__file__).parents[2] / "configs" / "profiles" / "internal-1t.json"
SCALE: Final = Scale(time=0.2, tokens=1 / 64, bytes=0.001)
SENDER: Final = "far-p0"
PROMPT_TOKENS: Final = 32_768
ANSWER_TOKENS: Final = 4
GBPS: Final = (100.0, 0.5, 100.0)
AUTO: Final = {"full_attention": {"compression": "auto"}, "linear_state": {"compression": "auto"}}
PATIENCE_S: Final = 60.0
POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingRow:
    """A line's width, and what became of the prompts sent over it."""

    gbps: float
    coding: str
    remote: int
    bytes: int
    coded_share: float
    saved_share: float
    ttft_mean_s: float

    def binding_gbps(self, times: float) -> float:
        """Of a line that takes so many times as long for a prompt as the prompt took here, all work of this machine included."""
        seconds = times * self.ttft_mean_s * SCALE.time
        return self.bytes / self.remote / seconds / SCALE.bytes_per_s(1.0)


Width = float | Callable[[CodingRow], float]  # Gbit/s, or by what became of the prompts over the line before


def topology_of(gbps: float, coding: str, state_dir: Path) -> Topology:
    """The PrfaaS node prefills everything: the PD cluster has no other node for it."""
    document = {
        "model": {
            "profile": str(PROFILE),
            "name": "live-coding",
            "time_scale": SCALE.time,
            "token_scale": SCALE.tokens,
            "byte_scale": SCALE.bytes,
        },
        "gateway": {"port": 0, "log_level": "warning", "threshold_tokens": 100, "routing": {"increment_tokens": 0}},
        "node": {
            "block_size": 16,
            "chunk_tokens": 128,
            "cache_bytes": 64 << 20,
            "coding": AUTO if coding == "auto" else {},
        },
        "links": [{"source": "far", "destination": "pd", "capacity_gbps": gbps}],
        "clusters": [
            {
                "name": "far",
                "kind": "prfaas",
                "hardware": "h200x8",
                "nodes": [{"node_id": SENDER, "role": "prefill", "transport": "tcp"}],
            },
            {"name": "pd", "kind": "pd", "hardware": "h20x8", "nodes": [{"node_id": "pd-d0", "role": "decode"}]},
        ],
    }
    return parse_topology(document, state_dir)


class CodingSystem:
    """A running system that is sent one prompt after the other."""

    def __init__(self, system: System, session: aiohttp.ClientSession, run_dir: Path, seed: int) -> None:
        self._system = system
        self._session = session
        self._file = run_dir / f"{SENDER}.toml"
        self._rng = np.random.default_rng(seed)
        self._sent = 0

    async def have_line(self, gbps: float) -> None:
        """The sender's budget is what such a line carries, from now on: its file is read again."""
        document, before = tomllib.loads(self._file.read_text()), await self._reloads()
        document["node"]["egress_bytes_per_s"] = {"pd": SCALE.bytes_per_s(gbps)}
        self._file.write_text(tomli_w.dumps(document))
        os.kill(self._system.nodes[SENDER].process.pid, signal.SIGHUP)
        async with asyncio.timeout(PATIENCE_S):
            while await self._reloads() == before:  # noqa: ASYNC110 a node sends no event
                await asyncio.sleep(POLL_S)

    async def _reloads(self) -> list[str]:
        async with self._session.get(f"{self._system.nodes[SENDER].metrics_url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return [line for line in lines if line.startswith("prfaas_config_reloads_total{")]

    async def send(self, count: int, gbps: float, coding: str) -> CodingRow:
        """So many prompts of equal length. Raises RuntimeError for a wrong answer."""
        first, ttft_s = self._sent, [await self._one() for _ in range(count)]
        records = (await self._records())[first:]
        sent = sum(record["bytes"] for record in records)
        coded = sum(size for record in records for name, size in record["codecs"].items() if name != "plain")
        return CodingRow(
            gbps=gbps,
            coding=coding,
            remote=sum(record["route"] == "remote" for record in records),
            bytes=sent,
            coded_share=coded / sent,
            saved_share=sum(record["bytes_saved"] for record in records) / sent,
            ttft_mean_s=fmean(ttft_s),
        )

    async def _one(self) -> float:
        """TTFT in seconds of the model."""
        # The decode node computes the last token of a prompt, which the model's length has not.
        length, name = SCALE.tokens_of(PROMPT_TOKENS) + 1, f"r-{self._sent}"
        prompt = self._rng.integers(len(SPECIAL_TOKENS), VOCAB_SIZE, length).tolist()
        body = {"model": self._system.topology.model.served_name, "prompt": prompt, "max_tokens": ANSWER_TOKENS}
        body |= {"temperature": 0, "ignore_eos": True}
        answer = await complete(self._session, self._system.api_url, body, name)
        if answer.token_ids != emulated_tokens(prompt, ANSWER_TOKENS):
            raise RuntimeError(f"{name}: not the tokens of its prompt")
        self._sent += 1
        return answer.ttft_s / SCALE.time

    async def _records(self) -> list[dict[str, Any]]:
        """The gateway's, which writes one right after an answer's last byte."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                async with self._session.get(f"{self._system.api_url}/prfaas/requests") as answer:
                    records = [json.loads(line) for line in (await answer.text()).splitlines()]
                if len(records) >= self._sent:
                    return records
                await asyncio.sleep(POLL_S)


async def measure(
    coding: str, lines_gbps: Sequence[Width], requests: int, state_dir: Path, seed: int = 0
) -> list[CodingRow]:
    """One system, over one line after the other; a first prompt, over which connections are made, is not counted."""
    first, *_ = lines_gbps
    assert not callable(first)
    topology, run_dir = topology_of(first, coding, state_dir), state_dir / coding
    ensure_model(topology.model, state_dir, say)
    rows: list[CodingRow] = []
    async with System(topology, run_dir, lambda line: None) as system, aiohttp.ClientSession() as session:
        live = CodingSystem(system, session, run_dir, seed)
        await live.send(1, first, coding)
        for width in lines_gbps:
            gbps = width(rows[-1]) if callable(width) else width
            if rows:
                await live.have_line(gbps)
            rows.append(await live.send(requests, gbps, coding))
            say(f"{rows[-1]}")
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"{'line':>12}{'coding':>10}{'coded':>9}{'saved':>9}{'TTFT':>10}"]
    for row in rows:
        lines.append(
            f"{row['gbps']:>7g} Gb/s{row['coding']:>10}{row['coded_share']:>9.0%}{row['saved_share']:>9.0%}"
            f"{row['ttft_mean_s']:>8.2f} s"
        )
    return "\n".join(lines)


def say(line: str) -> None:
    """Progress, beside the result."""
    print(line, file=sys.stderr, flush=True)


async def run(args: argparse.Namespace) -> dict[str, Any]:
    begin, rows = time.monotonic(), []
    for coding in ("off", "auto"):
        rows += await measure(coding, args.gbps, args.requests, Path(args.state_dir), args.seed)
    seconds = time.monotonic() - begin
    return {"rows": [asdict(row) for row in rows], "load_average": os.getloadavg()[1], "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--requests", type=int, default=6, help="over each line")
    parser.add_argument("--gbps", type=float, nargs="+", default=list(GBPS), help="of the line, in turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state-dir", help="directory for files (default: a temporary one)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        args.state_dir = args.state_dir or directory
        result = asyncio.run(run(args))
    print(json.dumps(result, indent=2) if args.json else table(result["rows"]))


if __name__ == "__main__":
    main()

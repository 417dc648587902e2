"""The cost of a heavy tenant for a light one beside it: `python -m benchmarks.system.fairness [--json] [--only KIND …]
[--samples N]`.

Systems of emulated engines, gateway, agents and transfers being real, with two tenants of equal weight. The heavy one keeps 48
requests in flight; the light one sends a prompt every so often, well below its half. By what both want:

    prefill   long prompts, computed by one PrfaaS node
    local     long prompts, computed by the decode node itself
    decode    slots: long answers on a decode node that runs 16 at once
    rooms     pages: long answers on a decode node whose memory holds a dozen of their prompts, and that runs 6 at once
    line      bytes: prompts whose KVCache crosses a line that is slower than their prefill
    reading   the gateway: texts of 500 KB, which it refuses once it has read them, beside texts of 8 KB

TTFT of the light tenant in ms, beside and alone; the light one's tokens are checked.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np

from engine.byte_tokenizer import SPECIAL_TOKENS, VOCAB_SIZE, byte_tokenizer
from engine.emulated.emulated import emulated_tokens
from gateway.auth.keyring import digest_of
from prfaas.demo.client import complete
from prfaas.system.models import ensure_model
from prfaas.system.system import System
from prfaas.system.topology import Topology, parse_topology

ARCH: Final = "llama"  # 4 KiB of KVCache a token
HEAVY, LIGHT = "sk-heavy", "sk-light"
IN_FLIGHT: Final = 48
WARM_UP: Final = 2  # requests of the light tenant that are not counted
SETTLE_S: Final = 4.0  # until its backlog stands, and it has had more than the warm-up of the light one
IDLE_S: Final = 1.0  # until what it has left is gone


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSystem:
    """A system, and what both tenants ask of it: (tokens of a prompt, tokens of an answer).

    With `as_text` prompts are sent as texts. Each byte is a token of these models, so a token takes a quarter of the time there.
    """

    name: str
    heavy: tuple[int, int]
    light: tuple[int, int]
    prefill_s_per_token: float
    every_s: float = 1.0  # the light tenant's period
    step_s: float = 0.002
    is_remote: bool = True
    max_running: int = 64
    decode_cache_bytes: int = 1 << 30
    line_bytes_per_s: float = 0.0
    chunk_tokens: int = 64
    as_text: bool = False


KINDS: Final = (
    TenantSystem(name="prefill", heavy=(4096, 1), light=(768, 1), prefill_s_per_token=4e-4),
    TenantSystem(name="local", heavy=(4096, 1), light=(768, 1), prefill_s_per_token=4e-4, is_remote=False),
    TenantSystem(
        name="decode", heavy=(128, 250), light=(640, 4), prefill_s_per_token=4e-4, step_s=0.008, max_running=16,
    ),
    TenantSystem(
        name="rooms", heavy=(2048, 250), light=(1536, 4), prefill_s_per_token=1.5e-4, step_s=0.008, max_running=6,
        decode_cache_bytes=96 << 20,
    ),
    TenantSystem(name="line", heavy=(2048, 1), light=(1280, 1), prefill_s_per_token=1e-5, every_s=1.6, line_bytes_per_s=8e6),
    TenantSystem(
        name="reading", heavy=(500_000, 1), light=(8000, 1), prefill_s_per_token=1e-4, every_s=1.0, is_remote=False,
        chunk_tokens=8192, as_text=True,
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class FairnessRow:
    """The light tenant's times, in ms."""

    kind: str
    alone_p50: float
    alone_p90: float
    beside_p50: float
    beside_p90: float
    heavy_done: int
    heavy_refused: int
    load_average: float

    @property
    def ratio(self) -> float:
        """P90 beside over P90 alone."""
        return self.beside_p90 / self.alone_p90


def topology_of(kind: TenantSystem, state_dir: Path) -> Topology:
    """One PrfaaS node, unless prompts are to be computed where they decode, and one decode node."""
    args = ["--prefill-per-token-s", str(kind.prefill_s_per_token), "--decode-step-s", str(kind.step_s)]
    args += ["--max-running", str(kind.max_running)]
    west = {"node_id": "west-d0", "role": "decode", "cache_bytes": kind.decode_cache_bytes}
    clusters: list[dict[str, Any]] = [{"name": "west", "kind": "pd", "nodes": [west]}]
    if kind.is_remote:
        east = {"node_id": "east-p0", "role": "prefill", "cache_bytes": 1 << 30, "transport": "tcp"}
        if kind.line_bytes_per_s:
            east["egress_bytes_per_s"] = {"west": kind.line_bytes_per_s}
        clusters.append({"name": "east", "kind": "prfaas", "nodes": [east]})
    tenants = {name: {"keys": [digest_of(key)]} for name, key in (("heavy", HEAVY), ("light", LIGHT))}
    document = {
        "model": {"arch": ARCH, "name": "fairness"},
        "gateway": {"port": 0, "log_level": "warning", "threshold_tokens": 64, "tenants": tenants},
        "node": {"engine": "emulated", "engine_args": args, "block_size": 64, "chunk_tokens": kind.chunk_tokens},
        "clusters": clusters,
    }
    return parse_topology(document, state_dir)


class TwoTenants:
    """Two tenants of one running system."""

    def __init__(self, kind: TenantSystem, system: System, session: aiohttp.ClientSession, seed: int) -> None:
        self._kind = kind
        self._system = system
        self._session = session
        self._rng = np.random.default_rng(seed)
        self._numbers: Iterator[int] = count()
        self._filler = "".join(self._rng.choice(list("etaoin shrdlu "), kind.heavy[0])) if kind.as_text else ""
        self._tokenizer = byte_tokenizer()
        self.heavy_done = self.heavy_refused = 0

    async def light(self, samples: int, every_s: float) -> list[float]:
        """TTFT in ms of so many prompts, one after the other; at most one begins every `every_s`."""
        found, at_s = [], time.monotonic()
        for _ in range(samples):
            await asyncio.sleep(at_s - time.monotonic())
            at_s = max(at_s + every_s, time.monotonic())
            found.append(1e3 * await self._one(LIGHT, *self._kind.light))
        return found

    @asynccontextmanager
    async def heavy(self) -> AsyncIterator[None]:
        """Its requests are in flight inside."""
        senders = [asyncio.create_task(self._keep_sending()) for _ in range(IN_FLIGHT)]
        try:
            await asyncio.sleep(SETTLE_S)
            yield
        finally:
            for sender in senders:
                sender.cancel()
            await asyncio.gather(*senders, return_exceptions=True)

    async def _keep_sending(self) -> None:
        while True:
            try:
                await (self._refused_text() if self._kind.as_text else self._one(HEAVY, *self._kind.heavy))
                self.heavy_done += 1
            except Exception as error:
                self.heavy_refused += 1
                say(f"  heavy: {error}")
                await asyncio.sleep(1.0)

    async def _one(self, key: str, prompt_tokens: int, answer_tokens: int) -> float:
        body: dict[str, Any] = {"model": self._system.topology.model.served_name, "max_tokens": answer_tokens}
        if self._kind.as_text:
            body["prompt"] = text = self._new_text(prompt_tokens)
            prompt = self._tokenizer.encode(text).ids
        else:
            body["prompt"] = prompt = self._rng.integers(len(SPECIAL_TOKENS), VOCAB_SIZE, prompt_tokens).tolist()
        body |= {"temperature": 0, "ignore_eos": True}
        name, headers = f"r-{next(self._numbers)}", {"Authorization": f"Bearer {key}"}
        answer = await complete(self._session, self._system.api_url, body, name, headers)
        if key == LIGHT and answer.token_ids != emulated_tokens(prompt, answer_tokens):
            raise RuntimeError(f"{name}: not the tokens of its prompt")
        return answer.ttft_s

    async def _refused_text(self) -> None:
        """A text that is too long for the model, unlike any before from its first byte on."""
        body = {"model": self._system.topology.model.served_name, "prompt": self._new_text(self._kind.heavy[0])}
        address, headers = f"{self._system.api_url}/v1/completions", {"Authorization": f"Bearer {HEAVY}"}
        async with self._session.post(address, json=body, headers=headers) as answer:
            if "context_length_exceeded" not in (said := await answer.text()):
                raise RuntimeError(f"HTTP {answer.status}: {said[:300]}")

    def _new_text(self, size: int) -> str:
        return f"{next(self._numbers)} {self._filler}"[:size]


async def measure(kind: TenantSystem, samples: int, seed: int, state_dir: Path) -> FairnessRow:
    """The light tenant beside the heavy one, then alone, in one system."""
    topology = topology_of(kind, state_dir)
    ensure_model(topology.model, state_dir, lambda _: None)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        System(topology, state_dir / kind.name, lambda _: None) as system,
        aiohttp.ClientSession(connector=connector) as session,
    ):
        load = TwoTenants(kind, system, session, seed)
        await load.light(WARM_UP, 0.0)
        async with load.heavy():
            beside = await load.light(samples, kind.every_s)
        await asyncio.sleep(IDLE_S)
        alone = await load.light(samples, 0.1)
    return FairnessRow(
        kind=kind.name,
        alone_p50=percentile(alone, 50),
        alone_p90=percentile(alone, 90),
        beside_p50=percentile(beside, 50),
        beside_p90=percentile(beside, 90),
        heavy_done=load.heavy_done,
        heavy_refused=load.heavy_refused,
        load_average=round(os.getloadavg()[0], 1),
    )


def percentile(values: Sequence[float], of: float) -> float:
    return round(float(np.percentile(values, of)), 1)


def say(line: str) -> None:
    """Progress, beside the result."""
    print(line, file=sys.stderr, flush=True)


def table(rows: Sequence[FairnessRow]) -> str:
    lines = [f"{'':8}{'alone P50':>10}{'P90':>8}{'beside P50':>12}{'P90':>8}{'ratio':>7}{'heavy':>7}{'load':>6}"]
    lines += [
        f"{row.kind:8}{row.alone_p50:>10.0f}{row.alone_p90:>8.0f}{row.beside_p50:>12.0f}{row.beside_p90:>8.0f}"
        f"{row.ratio:>7.2f}{row.heavy_done:>7}{row.load_average:>6.1f}"
        for row in rows
    ]
    return "\n".join(lines)


async def run(kinds: Sequence[TenantSystem], samples: int, seed: int, state_dir: Path) -> list[FairnessRow]:
    """One kind after the other."""
    rows = []
    for kind in kinds:
        rows.append(await measure(kind, samples, seed, state_dir))
        say(table(rows[-1:]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="+", choices=[kind.name for kind in KINDS], default=[])
    parser.add_argument("--samples", type=int, default=10, help="of the light tenant (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    kinds = [kind for kind in KINDS if not args.only or kind.name in args.only]
    with tempfile.TemporaryDirectory() as directory:
        rows = asyncio.run(run(kinds, args.samples, args.seed, Path(directory)))
    if args.json:
        print(json.dumps([asdict(row) | {"ratio": round(row.ratio, 3)} for row in rows], indent=2))
        return
    print(table(rows))


if __name__ == "__main__":
    main()

"""Whether one tenant learns what another has sent: `python -m benchmarks.system.isolation [--json] [--probes N] [--tokens N]`.

A system of real engines (a tiny hybrid model) with two tenants. The victim sends a prompt; the prober then sends the
same prompt (a right guess) and one that no tenant sent (a wrong guess), in random order. What the prober can see of
each:

    cached_tokens   in the usage; above 0 it would reveal that another tenant has sent this
    route header    uncached tokens, and where it went
    TTFT            AUC of "a right guess is faster" (Mann-Whitney): 0.5 is a coin, 1 is certainty

Beside them, for comparison, the victim's own second send of each prompt, which is to be found.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np
from scipy.stats import rankdata

from engine.byte_tokenizer import SPECIAL_TOKENS, VOCAB_SIZE
from gateway.auth.keyring import digest_of
from prfaas.demo.client import DemoCompletion, complete
from prfaas.system.models import ensure_model
from prfaas.system.system import System
from prfaas.system.topology import Topology, parse_topology

VICTIM, PROBER, OPERATOR = "sk-victim", "sk-prober", "sk-operator"
Z_95: Final = 1.96
THRESHOLD: Final = 300  # tokens; longer prompts are prefilled in the other cluster


@dataclass(frozen=True, slots=True)
class ProberView:
    """A prober's observation."""

    ttft_s: float
    cached_tokens: int
    uncached_said: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """The separation between guesses of two kinds. Without any, `auc` lies within `noise` of 0.5 in 95 of 100 runs."""

    guesses: int
    cached_tokens: int
    routes_that_differ: int
    auc: float
    noise: float
    median_ttft_ms: tuple[float, float]


def leak(right: Sequence[ProberView], wrong: Sequence[ProberView]) -> Leak:
    """The difference between right and wrong guesses."""
    times = np.array([guess.ttft_s for guess in (*right, *wrong)])
    ranks, many = rankdata(-times), len(right)
    auc = (ranks[:many].sum() - many * (many + 1) / 2) / (many * len(wrong))
    spread = sqrt((many + len(wrong) + 1) / (12 * many * len(wrong)))
    return Leak(
        guesses=len(times),
        cached_tokens=sum(guess.cached_tokens for guess in right),
        routes_that_differ=sum(a.uncached_said != b.uncached_said for a, b in zip(right, wrong, strict=True)),
        auc=round(float(auc), 4),
        noise=round(Z_95 * spread, 4),
        median_ttft_ms=tuple(round(float(1e3 * np.median(part)), 2) for part in (times[:many], times[many:])),  # type: ignore[arg-type]
    )


def topology(state_dir: Path) -> Topology:
    """One PrfaaS and one PD cluster, and a gateway with two tenants."""
    tenants = {name: {"keys": [digest_of(key)]} for name, key in (("victim", VICTIM), ("prober", PROBER))}
    gateway = {
        "port": 0, "threshold_tokens": THRESHOLD, "tenants": tenants, "operator_keys": [digest_of(OPERATOR)],
        "log_level": "warning",
    }  # fmt: skip
    clusters = [
        {"name": "east", "kind": "prfaas", "nodes": [{"node_id": "far", "role": "prefill"}]},
        {"name": "west", "kind": "pd", "nodes": [{"node_id": "decode", "role": "decode"}]},
    ]
    document = {"model": {"arch": "kimi_linear"}, "gateway": gateway, "clusters": clusters}
    return parse_topology(document, state_dir)


async def probe(probes: int, tokens: int, seed: int, state_dir: Path) -> dict[str, Any]:
    """Sends everything, one after the other."""
    rng, count = np.random.default_rng(seed), 0
    system = topology(state_dir)
    ensure_model(system.model, state_dir, lambda _: None)
    async with System(system, state_dir / "run", lambda _: None) as running, aiohttp.ClientSession() as http:

        async def ask(key: str, prompt: Sequence[int]) -> ProberView:
            nonlocal count
            count += 1
            body = {"model": system.model.served_name, "prompt": list(prompt), "max_tokens": 1, "temperature": 0}
            headers = {"Authorization": f"Bearer {key}"}
            done: DemoCompletion = await complete(http, running.api_url, body, f"probe-{count}", headers)
            said = dict(part.strip().split("=", 1) for part in done.route.split(";") if "=" in part)
            return ProberView(done.ttft_s, done.cached_tokens, int(said.get("uncached", -1)))

        def prompt() -> list[int]:
            return [int(token) for token in rng.integers(len(SPECIAL_TOKENS), VOCAB_SIZE, tokens)]

        right, wrong, own = [], [], []
        for _ in range(20):  # what engines and estimates need to warm up
            await ask(PROBER, prompt())
        for _ in range(probes // 2):
            theirs, nobodys = prompt(), prompt()
            await ask(VICTIM, theirs)
            for is_right in rng.permutation([True, False]):
                (right if is_right else wrong).append(await ask(PROBER, theirs if is_right else nobodys))
            own.append(await ask(VICTIM, theirs))
    return {
        "tokens": tokens,
        "between_tenants": asdict(leak(right, wrong)),
        "same_tenant": asdict(leak(own, wrong)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--probes", type=int, default=10_000, help="right and wrong guesses together (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=600, help="of a prompt (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        found = asyncio.run(probe(args.probes, args.tokens, args.seed, Path(directory)))
    found |= {"took_s": round(time.monotonic() - began), "load_average": round(os.getloadavg()[0], 1)}
    if args.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{args.probes} probes of {args.tokens} tokens, {found['took_s']} s, load average {found['load_average']}")
    for name in ("between_tenants", "same_tenant"):
        one = found[name]
        cached, routes = one["cached_tokens"], one["routes_that_differ"]
        mine, others = one["median_ttft_ms"]
        print(f"{name:16} cached tokens of right guesses {cached:>8}   routes that differ {routes:>5}")
        print(f"{'':16} AUC of TTFT {one['auc']:.3f} (noise ± {one['noise']:.3f}), median {mine} / {others} ms")


if __name__ == "__main__":
    main()

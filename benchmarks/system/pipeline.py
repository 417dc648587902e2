"""TTFT of a long prompt by the stages of its PrfaaS node:
`python -m benchmarks.system.pipeline [--engine E] [--json] [--plot FILE]`.

A running system for each number of stages: gateway, a PrfaaS node with `stages = N`, a decode node, KVCache by TCP between them.
The engines' time is emulated (sleeping stands for computing, so two cores do for 16 computers), their tokens are checked. A
prompt of C chunks, alone and several at once, each with the time to its first token as a client sees it, beside

    (C + N - 1) · T / N                   the pipeline's arithmetic, T seconds for a chunk on one computer
    max(1 / N, f · (N - 1) / N) · C · T   sequence parallelism: each of N computers has an Nth of the prompt and gets all others'
                                          K and V at every layer, behind computing as far as that hides it

f = Φ_kv / B is KVCache made per second of one computer over what its link carries; 0 is exchange for nothing. The pipeline's own
exchange, a chunk's hidden states from stage to stage, is in neither its arithmetic nor the emulation.

`--engine embedded` computes: a model of random weights on one thread per stage, so as many stages as there are cores. Systems of
all numbers of stages run beside each other and are asked in turn, so that other work of the machine meets them alike; what counts
is the ratio of two that follow each other.
"""

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import aiohttp
import numpy as np

from engine.byte_tokenizer import save_byte_tokenizer
from engine.emulated.emulated import emulated_tokens
from planner.model.profile import load_profile
from prfaas.system.system import System
from prfaas.system.topology import parse_topology

STAGES: Final = (1, 2, 4, 8, 16)
CHUNK_TOKENS: Final = 512
CHUNKS: Final = 16
CHUNK_S: Final = 0.4
AT_ONCE: Final = 4
ROUNDS: Final = 3
BLOCK: Final = 64
OUTPUT_TOKENS: Final = 4
FIRST_PLAIN_TOKEN: Final = 4
LINE: Final = b"data: {"
# Whose K and V sequence parallelism would move: (profile, label). Their Φ_kv is the paper's, at 128K tokens on 8 H200.
EXCHANGED: Final = (("qwen3-235b", "Qwen3-235B"), ("minimax-m2.5", "MiniMax-M2.5"))
LINK_GBPS: Final = 100.0
# Real computation: a second or so for a chunk on one core; Python and the transfer are hundredths of that.
REAL_STAGES: Final = (1, 2)
REAL_CHUNKS: Final = 12
REAL_CHUNK_TOKENS: Final = 256
REAL_MODEL: Final = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8}
REAL_ROUNDS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRow:
    """Seconds to the first token: of a prompt alone (median), and of the last of several that come at once."""

    stages: int
    ttft_s: float
    arithmetic_s: float
    last_of_several_s: float
    several_arithmetic_s: float
    overlapped: float  # share of the KVCache's bytes that left before its prefill had ended


def pipeline_s(stages: int, chunks: int) -> float:
    """Until the last of `chunks` is through, whosever they are."""
    return (chunks + stages - 1) * CHUNK_S / stages


def sequence_s(computers: int, exchange: float) -> float:
    """Of a prompt, by sequence parallelism; `exchange`: the f of above."""
    return max(1 / computers, exchange * (computers - 1) / computers) * CHUNKS * CHUNK_S


def exchanges() -> list[tuple[str, float]]:
    """f, by model."""
    found = []
    for name, label in EXCHANGED:
        gbps = load_profile(Path("configs/profiles") / f"{name}.json").kv_throughput_gbps[-1][1]
        found.append((label, gbps / LINK_GBPS))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RealRow:
    """Of an engine that computes. `ratio`: median of each TTFT over that of one stage just before.

    `busiest_s`: time on a processor, by prompt, of that of the node's processes which had most: what does not depend on who else
    wants the processors.
    """

    stages: int
    ttft_s: tuple[float, ...]
    busiest_s: float
    ratio: float
    arithmetic_ratio: float
    overlapped: float
    load: float


def real_topology(model: Path, stages: int) -> dict[str, Any]:
    document = topology(stages)
    document["model"] = {"path": str(model), "name": "model"}
    document["node"] |= {"engine": "embedded", "chunk_tokens": REAL_CHUNK_TOKENS, "engine_args": []}
    document["gateway"]["routing"] = {"prefill_tokens_per_s": 200.0}
    return document


def topology(stages: int) -> dict[str, Any]:
    prefill = {"node_id": "far", "role": "prefill", "transport": "tcp", "stages": stages}
    return {
        "model": {"arch": "kimi_linear", "name": "model"},
        "gateway": {"port": 0, "threshold_tokens": 1.0, "routing": {"prefill_tokens_per_s": CHUNK_TOKENS / CHUNK_S}},
        "node": {
            "engine": "emulated",
            "cache_bytes": 128 << 20,
            "block_size": BLOCK,
            "chunk_tokens": CHUNK_TOKENS,
            "engine_args": ["--prefill-per-token-s", str(CHUNK_S / CHUNK_TOKENS)],
        },
        "clusters": [
            {"name": "east", "kind": "prfaas", "nodes": [prefill]},
            {"name": "west", "kind": "pd", "nodes": [{"node_id": "near", "role": "decode"}]},
        ],
    }


def any_prompt(seed: int, tokens: int) -> list[int]:
    rng = np.random.default_rng(seed)
    return [int(token) for token in rng.integers(FIRST_PLAIN_TOKEN, 256, tokens)]


async def ask(http: aiohttp.ClientSession, seed: int) -> float:
    """TTFT of a new prompt. Raises RuntimeError for wrong tokens, and for a prompt that took another way."""
    prompt = any_prompt(seed, CHUNKS * CHUNK_TOKENS + 1)
    ttft_s, tokens = await answered(http, prompt)
    if tokens != emulated_tokens(prompt, OUTPUT_TOKENS):
        raise RuntimeError(f"wrong tokens: {tokens}")
    return ttft_s


async def answered(http: aiohttp.ClientSession, prompt: Sequence[int]) -> tuple[float, list[int]]:
    """Seconds to the first token, and all tokens. Raises RuntimeError for a prompt that took another way."""
    body = {
        "model": "model", "prompt": list(prompt), "max_tokens": OUTPUT_TOKENS, "temperature": 0, "stream": True,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    began_s, ttft_s = time.monotonic(), 0.0
    tokens: list[int] = []
    async with http.post("/v1/completions", json=body) as answer:
        answer.raise_for_status()
        if not answer.headers.get("x-prfaas-route", "").startswith("remote"):
            raise RuntimeError(f"computed elsewhere: {answer.headers.get('x-prfaas-route')}")
        async for line in answer.content:
            if line.startswith(LINE):
                ttft_s = ttft_s or time.monotonic() - began_s
                tokens += json.loads(line.removeprefix(b"data: "))["choices"][0].get("token_ids") or ()
    return ttft_s, tokens


async def overlapped(http: aiohttp.ClientSession) -> float:
    """Of what prefills have sent, the share that left before they ended."""
    async with http.get("/prfaas/requests") as answer:
        records = [json.loads(line) for line in (await answer.text()).splitlines()]
    sent = sum(record["bytes"] for record in records)
    return float(sum((record["overlap"] or 0.0) * record["bytes"] for record in records) / sent)


async def measure(stages: int) -> PipelineRow:
    """A system of its own."""
    with tempfile.TemporaryDirectory(prefix="prfaas-pipeline-") as name:
        directory = Path(name)
        model = directory / "models" / "kimi_linear-0"
        model.mkdir(parents=True)
        save_byte_tokenizer(model, CHUNKS * CHUNK_TOKENS * 2)
        system = System(parse_topology(topology(stages), directory), directory / "run", lambda line: None)
        async with system, aiohttp.ClientSession(system.api_url) as http:
            alone = [await ask(http, seed) for seed in range(ROUNDS)]
            several = await asyncio.gather(*(ask(http, ROUNDS + number) for number in range(AT_ONCE)))
            return PipelineRow(
                stages=stages,
                ttft_s=median(alone),
                arithmetic_s=pipeline_s(stages, CHUNKS),
                last_of_several_s=max(several),
                several_arithmetic_s=pipeline_s(stages, AT_ONCE * CHUNKS),
                overlapped=await overlapped(http),
            )


def build_real_model(directory: Path) -> None:
    """Needs the extra `embedded`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    longest = 2 * REAL_CHUNKS * REAL_CHUNK_TOKENS
    config = LlamaConfig(vocab_size=512, num_key_value_heads=2, max_position_embeddings=longest, **REAL_MODEL)
    LlamaForCausalLM(config).save_pretrained(directory)
    save_byte_tokenizer(directory, longest)


def processor_s(process: int) -> dict[int, float]:
    """Seconds that a process and its descendants have had, by process."""
    parents, used = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = stat.read_text().rpartition(")")[2].split()
            pid = int(stat.parent.name)
            parents[pid], used[pid] = int(fields[1]), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    family, grown = {process}, True
    while grown:
        younger = {pid for pid, parent in parents.items() if parent in family} - family
        family, grown = family | younger, bool(younger)
    return {pid: used[pid] for pid in family if pid in used}


async def measure_real() -> list[RealRow]:
    """Systems beside each other, asked for the same prompt in turn. Raises RuntimeError where their tokens differ."""
    ttfts: dict[int, list[float]] = {stages: [] for stages in REAL_STAGES}
    async with contextlib.AsyncExitStack() as running:
        base = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="prfaas-pipeline-")))
        build_real_model(base / "model")
        clients, nodes = {}, {}
        for stages in REAL_STAGES:
            directory = base / f"stages-{stages}"
            parsed = parse_topology(real_topology(base / "model", stages), directory)
            system = await running.enter_async_context(System(parsed, directory / "run", lambda line: None))
            nodes[stages] = system.nodes["far"].process.pid
            clients[stages] = await running.enter_async_context(aiohttp.ClientSession(system.api_url))
        for seed in range(REAL_ROUNDS + 1):  # the first one warms up
            if seed == 1:
                before = {stages: processor_s(node) for stages, node in nodes.items()}
            prompt = any_prompt(seed, REAL_CHUNKS * REAL_CHUNK_TOKENS + 1)
            answers = {stages: await answered(http, prompt) for stages, http in clients.items()}
            if len({tuple(tokens) for _, tokens in answers.values()}) != 1:
                raise RuntimeError(f"tokens differ: {answers}")
            for stages, (ttft_s, _) in answers.items():
                ttfts[stages] += [ttft_s] if seed else []
        return [
            RealRow(
                stages=stages,
                ttft_s=tuple(ttfts[stages]),
                busiest_s=max(used - before[stages].get(pid, 0.0) for pid, used in processor_s(nodes[stages]).items())
                / REAL_ROUNDS,
                ratio=median(one / other for one, other in zip(ttfts[stages], ttfts[REAL_STAGES[0]], strict=True)),
                arithmetic_ratio=(REAL_CHUNKS + stages - 1) / (stages * REAL_CHUNKS),
                overlapped=await overlapped(clients[stages]),
                load=os.getloadavg()[0],
            )
            for stages in REAL_STAGES
        ]


def real_table(rows: Sequence[RealRow]) -> str:
    """For people."""
    lines = [
        "| N | TTFT, s: median, all | of N = 1 | (C + N − 1) / (N · C) | busiest process, s | sent before the end |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        every = ", ".join(f"{ttft_s:.1f}" for ttft_s in row.ttft_s)
        lines.append(
            f"| {row.stages} | **{median(row.ttft_s):.1f}** ({every}) | **{row.ratio:.2f}** | {row.arithmetic_ratio:.2f} | "
            f"{row.busiest_s:.2f} | "
            f"{100 * row.overlapped:.0f} % |"
        )
    return "\n".join(lines)


def table(rows: Sequence[PipelineRow]) -> str:
    """For people."""
    models = exchanges()
    heads = [
        "N",
        "TTFT, s",
        "(C + N − 1) · T / N",
        f"last of {AT_ONCE} at once",
        "by arithmetic",
        "sent before the end",
    ]
    heads += ["sequence parallel, free", *(f"sequence parallel, {label}" for label, _ in models)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [f"{row.stages}", f"**{row.ttft_s:.2f}**", f"{row.arithmetic_s:.2f}", f"{row.last_of_several_s:.2f}"]
        cells += [
            f"{row.several_arithmetic_s:.2f}",
            f"{100 * row.overlapped:.0f} %",
            f"{sequence_s(row.stages, 0.0):.2f}",
        ]
        cells += [f"{sequence_s(row.stages, exchange):.2f}" for _, exchange in models]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(rows: Sequence[PipelineRow], path: Path) -> None:
    """Writes the figure. Needs the extra `plots`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    numbers = range(1, STAGES[-1] + 1)
    # Okabe and Ito's colours, told apart by colour-blind eyes as well.
    axes.plot(numbers, [pipeline_s(n, CHUNKS) for n in numbers], color="#0072b2", label="pipeline, (C + N − 1) · T / N")
    axes.scatter(
        [row.stages for row in rows],
        [row.ttft_s for row in rows],
        color="#0072b2",
        zorder=3,
        label="pipeline, measured",
    )
    styles = [("free exchange", 0.0, "#999999", ":")]
    for (label, exchange), colour in zip(exchanges(), ("#e69f00", "#d55e00"), strict=True):
        styles.append((f"K and V of {label}, {LINK_GBPS:g} Gbit/s", exchange, colour, "--"))
    for label, exchange, colour, dashes in styles:
        axes.plot(
            numbers, [sequence_s(n, exchange) for n in numbers], color=colour, linestyle=dashes,
            label=f"sequence parallel, {label}",
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="N: stages, or computers", ylabel="TTFT, s")
    for axis, ticks in ((axes.xaxis, STAGES), (axes.yaxis, (0.5, 1, 2, 4, 8))):
        axis.set_major_locator(matplotlib.ticker.FixedLocator(ticks))
        axis.set_minor_locator(matplotlib.ticker.NullLocator())
        axis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_title(f"A prompt of {CHUNKS} chunks, {CHUNK_S:g} s each on one computer", fontsize=10)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=100, bbox_inches="tight")
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="TTFT of a long prompt by the stages of its PrfaaS node")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the figure there (extra `plots`)")
    parser.add_argument("--engine", choices=["emulated", "embedded"], default="emulated", help="(default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.engine == "embedded":
        real = asyncio.run(measure_real())
        print(
            json.dumps([asdict(row) for row in real])
            if arguments.json
            else f"{real_table(real)}\n\nload average {real[0].load:.1f}"
        )
        return
    rows = [asyncio.run(measure(stages)) for stages in STAGES]
    if arguments.plot is not None:
        plot(rows, arguments.plot)
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        print(f"{table(rows)}\n\nload average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()

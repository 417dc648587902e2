"""The cost of the gateway's question to an engine about images: `.venv-vllm/bin/python -m benchmarks.vllm.images
[--rounds N] [--json]`.

Two vLLM servers of a tiny model that sees, a PrfaaS node and a decode node, and our gateway before them. A chat of one image
and some text has its prefill at the one and its answer from the other; before that the gateway has had the image taken apart
once more (`/v1/chat/completions/render`). Beside it the same chat goes to the decode node's server directly, under a salt of its
own, so that nothing is cached: one server alone. New images each round, JPEGs of noise that is coarse enough to be a picture's;
the order of the ways changes from round to round.

`render` is the question alone, asked of the decode node's server for another image of that size; `ratio` is the median over
rounds of the gateway's TTFT over the server's.
"""

import argparse
import asyncio
import base64
import io
import json
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Final

import aiohttp
import numpy as np

from prfaas.system.system import System
from prfaas.system.topology import parse_topology

SIZES: Final = ((224, 224), (1024, 768), (4000, 3000))  # pixels
GRAIN: Final = 8  # pixels across
ROUNDS: Final = 7
NUMBERS: Final = 250  # words of text beside the image
CHAT: Final = "/v1/chat/completions"
LINE: Final = b"data: {"


@dataclass(frozen=True, slots=True)
class ImagesRow:
    """Seconds, medians of all rounds, for images of `width` by `height` pixels and `num_bytes`."""

    width: int
    height: int
    num_bytes: int
    render_s: float
    alone_s: float
    gateway_s: float
    ratio: float
    remote: int
    load: float


def topology(model: Path) -> dict[str, Any]:
    return {
        "model": {"path": str(model), "name": "tiny"},
        "gateway": {"port": 0, "threshold_tokens": 300},
        "node": {
            "engine": "vllm",
            "engine_args": ["--dtype", "float32", "--num-gpu-blocks-override", "160"],
            "chunk_tokens": 256,
            "block_size": 32,
            "max_model_len": 2048,
            "cache_bytes": 64 << 20,
        },
        "clusters": [
            {"name": "east", "kind": "prfaas", "nodes": [{"node_id": "far", "role": "prefill", "transport": "tcp"}]},
            {"name": "west", "kind": "pd", "nodes": [{"node_id": "decode0", "role": "decode"}]},
        ],
    }


def jpeg(rng: np.random.Generator, width: int, height: int) -> bytes:
    from PIL import Image

    grains = rng.integers(0, 256, (-(-height // GRAIN), -(-width // GRAIN), 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(grains).resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def chat_about(image: bytes, start: int) -> dict[str, Any]:
    url = "data:image/jpeg;base64," + base64.b64encode(image).decode()
    text = " ".join(map(str, range(start, start + NUMBERS)))
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
    }


class ImageServers:
    """The gateway, and the decode node's server alone."""

    def __init__(self, http: aiohttp.ClientSession, gateway_url: str, engine_url: str) -> None:
        self._http = http
        self._gateway_url = gateway_url
        self._engine_url = engine_url
        self.remote = 0

    async def by_gateway(self, asked: dict[str, Any]) -> tuple[float, list[int]]:
        return await self._streamed(self._gateway_url, asked)

    async def alone(self, asked: dict[str, Any]) -> tuple[float, list[int]]:
        return await self._streamed(self._engine_url, asked | {"cache_salt": uuid.uuid4().hex})

    async def render(self, asked: dict[str, Any]) -> float:
        began_s = time.monotonic()
        async with self._http.post(f"{self._engine_url}{CHAT}/render", json=asked | {"mm_payload": "none"}) as answer:
            answer.raise_for_status()
            await answer.read()
        return time.monotonic() - began_s

    async def _streamed(self, url: str, asked: dict[str, Any]) -> tuple[float, list[int]]:
        """Seconds to the first token, and all tokens."""
        began_s, ttft_s = time.monotonic(), 0.0
        tokens: list[int] = []
        async with self._http.post(f"{url}{CHAT}", json=asked | {"stream": True, "return_token_ids": True}) as answer:
            answer.raise_for_status()
            self.remote += answer.headers.get("x-prfaas-route", "").startswith("remote")
            async for line in answer.content:
                if line.startswith(LINE):
                    for choice in json.loads(line.removeprefix(b"data: "))["choices"]:
                        if said := choice.get("token_ids"):
                            ttft_s = ttft_s or time.monotonic() - began_s
                            tokens += said
        return ttft_s, tokens


async def measure(ways: ImageServers, rng: np.random.Generator, size: tuple[int, int], rounds: int) -> ImagesRow:
    """Raises RuntimeError where the two ways have different answers."""
    taken: dict[str, list[float]] = {"gateway": [], "alone": [], "render": []}
    sizes = []
    for number in range(-1, rounds):  # the first one opens connections
        image = jpeg(rng, *size)
        asked = chat_about(image, int(rng.integers(1000, 9000)))
        ask: list[tuple[str, Callable[[dict[str, Any]], Coroutine[Any, Any, tuple[float, list[int]]]]]]
        ask = [("gateway", ways.by_gateway), ("alone", ways.alone)]
        found = {name: await way(asked) for name, way in (ask if number % 2 else reversed(ask))}
        if found["gateway"][1] != found["alone"][1]:
            raise RuntimeError(f"{size}: answers differ: {found}")
        render_s = await ways.render(chat_about(jpeg(rng, *size), 1))
        if number < 0:
            ways.remote = 0
            continue
        sizes.append(len(image))
        taken["render"].append(render_s)
        for name, (ttft_s, _) in found.items():
            taken[name].append(ttft_s)
    return ImagesRow(
        width=size[0],
        height=size[1],
        num_bytes=int(median(sizes)),
        render_s=median(taken["render"]),
        alone_s=median(taken["alone"]),
        gateway_s=median(taken["gateway"]),
        ratio=median(ours / theirs for ours, theirs in zip(taken["gateway"], taken["alone"], strict=True)),
        remote=ways.remote,
        load=os.getloadavg()[0],
    )


async def run(rounds: int) -> list[ImagesRow]:
    from tests.vllm.servers.vision import build_vision

    with tempfile.TemporaryDirectory(prefix="prfaas-images-") as name:
        base = Path(name)
        parsed = parse_topology(topology(build_vision(base)), base)
        system = System(parsed, base / "run", lambda line: print(line, file=sys.stderr, flush=True))
        async with system, aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300.0)) as http:
            ways = ImageServers(http, system.api_url, system.nodes["decode0"].engine_url)
            rng = np.random.default_rng(0)
            return [await measure(ways, rng, size, rounds) for size in SIZES]


def table(rows: Sequence[ImagesRow], rounds: int) -> str:
    """For people."""
    lines = [
        "| pixels | JPEG | render | TTFT, one server alone | TTFT, gateway and two servers | ratio | prefilled remotely |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.width} × {row.height} | {row.num_bytes / 1e6:.2f} MB | {row.render_s:.3f} s | {row.alone_s:.3f} s | "
            f"{row.gateway_s:.3f} s | **{row.ratio:.2f}** | {row.remote} of {rounds} |"
        )
    return "\n".join([*lines, "", f"load average {rows[-1].load:.1f}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if find_spec("vllm") is None:
        sys.exit(
            "benchmarks.vllm.images: needs vLLM: run it with .venv-vllm/bin/python, which `make test-vllm` sets up"
        )
    rows = asyncio.run(run(args.rounds))
    print(json.dumps([asdict(row) for row in rows], indent=2) if args.json else table(rows, args.rounds))


if __name__ == "__main__":
    main()

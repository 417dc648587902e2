"""Measures coding of KVCache and its effect on tokens: ratio, speed, and greedy tokens after coding and decoding.

    python -m benchmarks.transport.compression [--json] [--models kimi_linear llama | smollm2 | DIRECTORY ...] [--text FILE]

For every prompt the model computes its KVCache once. The slabs that would travel are coded and decoded in chunks as lanes do
it, and decoding goes on from what came out: compared with tokens decoded from the exact bytes. Seconds are processor time of
one thread, so that other work on the machine counts little. Quantised are the attention groups; states travel compressed,
unless a codec is named with "+states".

The tiny models (built on the fly) have random weights and random prompts: their logits are closer to each other than
those of trained models. That makes them a strict test of tokens and a poor one of ratios. `smollm2` is a small trained
one (installed on demand, see benchmarks/lib/trained.py), a DIRECTORY holds any local transformers model; their prompts
are cut out of the text.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.trained import smollm2
from engine.agent.job_pages import JobKV, MappedArena
from engine.torch.embedded import EmbeddedEngine, EmbeddedSequence
from engine.torch.tiny import ARCHITECTURES, build_model
from hybrid_cache.layout.layout import ModelLayout
from hybrid_cache.layout.spec import LinearState
from hybrid_cache.layout.transfers import RangeKey, transfer_ranges
from prfaas_cluster.coding import runs_of
from transport.coding.codec import LOSSY, ChunkDecoder, ChunkEncoder, ChunkPart, Codec, decodable, parts_of
from transport.coding.elements import to_floats
from transport.control.messages import JobPages

CHUNK_BYTES = 4 << 20
PREFILL_TOKENS = 256
FIRST_PLAIN_TOKEN = 4
CODECS = {
    "zstd": Codec.ZSTD,
    "int8": Codec.INT8,
    "fp8": Codec.FP8,
    "int8+zstd": Codec.INT8 | Codec.ZSTD,
    "fp8+zstd": Codec.FP8 | Codec.ZSTD,
    "int8+zstd+states": Codec.INT8 | Codec.ZSTD,
}


@dataclass(frozen=True, slots=True)
class CompressionRow:
    """One codec on one model."""

    model: str
    dtype: str
    codec: str
    megabytes: float  # of KVCache, plain
    ratio: float  # plain ÷ coded
    attention_ratio: float  # of the attention groups alone
    encode_gb_per_cpu_s: float
    decode_gb_per_cpu_s: float
    cpu_s_per_gb: float  # both ends
    rms_error: float  # of attention values, relative to their own root mean square
    prompts_equal: float  # share whose tokens are all those of exact KVCache
    tokens_equal: float  # share of positions with the same token, decoding freely
    steps_equal: float  # share of steps with the same token when fed the exact ones
    first_divergence_median: float | None  # position of the first other token, among prompts that have one


class CompressionJob:
    """Pages of one prompt, in an arena of its own."""

    def __init__(self, layout: ModelLayout, num_tokens: int) -> None:
        self.layout, self.num_tokens = layout, num_tokens
        numbers = iter(range(1 << 30))
        count = -(-num_tokens // layout.block_size)
        blocks: list[tuple[tuple[int, ...], ...]] = []
        states: list[dict[int, tuple[int, ...]]] = []
        for group, entry in enumerate(layout.groups):
            is_state = isinstance(entry.spec, LinearState)
            pages = [_some(numbers, layout.pages_per_block(group)) for _ in range(1 if is_state else count)]
            blocks.append(() if is_state else tuple(pages))
            states.append({num_tokens: pages[0]} if is_state else {})
        self.pages = JobPages(
            job="j", num_tokens=num_tokens, cached_tokens=0, blocks=tuple(blocks), states=tuple(states)
        )
        self.arena = MappedArena.in_memory(layout.page_bytes, next(numbers))
        self.kv = JobKV(layout, self.arena, self.pages)

    def views(self, key: RangeKey) -> list[memoryview]:
        is_state = key.group in self.layout.state_groups
        held: Any = self.pages.states if is_state else self.pages.blocks
        segments = self.layout.segments(key.group, key.layer_index, held[key.group][key.block])
        return [self.arena.data[s.start : s.start + s.length].data for s in segments]


def _some(numbers: Iterator[int], count: int) -> tuple[int, ...]:
    return tuple(next(numbers) for _ in range(count))


@dataclass(slots=True)
class Bytes:
    """The result of coding one or more prompts."""

    plain: int = 0
    coded: int = 0
    attention_plain: int = 0
    attention_coded: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    squares: float = 0.0
    squared_errors: float = 0.0


def there_and_back(source: CompressionJob, target: CompressionJob, codec: Codec, total: Bytes, *, states: bool) -> None:
    """Codes what would travel of `source`, in chunks, and decodes it into `target`."""
    layout = source.layout
    encoder, decoder = ChunkEncoder(), ChunkDecoder(decodable(lossy=True))
    room, plain = memoryview(bytearray(CHUNK_BYTES)), memoryview(bytearray(CHUNK_BYTES))
    for keys in chunks(layout, transfer_ranges(layout, source.num_tokens, 0)):
        before = b"".join(view for key in keys for view in source.views(key))
        began = time.thread_time()
        parts = [part for key in keys for part in coded_parts(layout, key, source.views(key), codec, states)]
        encoded = encoder.encode(parts, room[: len(before)])
        ended = time.thread_time()
        into = plain[: len(before)]
        if encoded is None:
            into[:] = before
            coded_bytes = len(before)
        else:
            coded_bytes = encoded[0]
            decoder.decode(room[:coded_bytes], into)
        total.decode_s += time.thread_time() - ended
        total.encode_s += ended - began
        total.plain += len(before)
        total.coded += coded_bytes
        if keys[0].group not in layout.state_groups:
            total.attention_plain += len(before)
            total.attention_coded += coded_bytes
            exact, back = (to_values(data, layout.dtype) for data in (before, bytes(into)))
            total.squares += float(np.sum(exact**2))
            total.squared_errors += float(np.sum((back - exact) ** 2))
        at = 0
        for view in (view for key in keys for view in target.views(key)):
            view[:] = into[at : at + len(view)]
            at += len(view)


def chunks(layout: ModelLayout, ranges: Sequence[RangeKey]) -> Iterator[list[RangeKey]]:
    """Ranges by chunk; a chunk is of one group."""
    keys: list[RangeKey] = []
    size = 0
    for key in ranges:
        slab = layout.slab_bytes(key.group)
        if slab > CHUNK_BYTES:
            raise ValueError(f"a slab of {slab} bytes is larger than a chunk of {CHUNK_BYTES}")
        if keys and (size + slab > CHUNK_BYTES or key.group != keys[0].group):
            yield keys
            keys, size = [], 0
        keys.append(key)
        size += slab
    if keys:
        yield keys


def coded_parts(
    layout: ModelLayout, key: RangeKey, views: Sequence[memoryview], codec: Codec, states: bool
) -> list[ChunkPart]:
    is_state = key.group in layout.state_groups
    how = Codec.ZSTD if is_state and codec & LOSSY and not states else codec
    whole = memoryview(b"".join(views))
    parts: list[ChunkPart] = []
    at = 0
    for run in runs_of(layout.elements(key.group)):
        parts += parts_of(run, [whole[at : at + run.num_bytes]], 0, how, "states" if is_state else "attention")
        at += run.num_bytes
    return parts


def to_values(data: bytes, dtype: str) -> np.ndarray:
    return to_floats(np.frombuffer(data, np.uint8), dtype).astype(np.float64)


class Subject:
    """A model, its prompts, and the tokens that exact KVCache gives."""

    def __init__(self, name: str, engine: EmbeddedEngine, prompts: list[list[int]], num_output: int) -> None:
        self.name, self.engine, self.num_output = name, engine, num_output
        self.last = [prompt[-1] for prompt in prompts]
        self.jobs = [self._prefilled(prompt[:-1]) for prompt in prompts]
        self.expected = [self.decode(job, last) for job, last in zip(self.jobs, self.last, strict=True)]

    def _prefilled(self, tokens: list[int]) -> CompressionJob:
        job, sequence = CompressionJob(self.engine.layout, len(tokens)), self.engine.new_sequence(len(tokens))
        for start in range(0, len(tokens), PREFILL_TOKENS):
            self.engine.prefill(sequence, tokens[start : start + PREFILL_TOKENS], job.kv)
        return job

    def _loaded(self, job: CompressionJob) -> EmbeddedSequence:
        sequence = self.engine.new_sequence(job.num_tokens + self.num_output)
        self.engine.load(sequence, job.kv, job.num_tokens)
        return sequence

    def decode(self, job: CompressionJob, last: int, fed: Sequence[int] = ()) -> list[int]:
        """Greedy tokens after `job`'s; with `fed`, each step is given that token instead of its own choice."""
        sequence, tokens, token = self._loaded(job), list[int](), last
        for step in range(self.num_output):
            tokens.append(int(np.argmax(self.engine.decode([sequence], [token])[0])))
            token = fed[step] if fed else tokens[-1]
        return tokens

    def row(self, name: str, codec: Codec) -> CompressionRow:
        total, equal, steps, diverged = Bytes(), list[float](), list[float](), list[int]()
        for job, last, expected in zip(self.jobs, self.last, self.expected, strict=True):
            back = CompressionJob(self.engine.layout, job.num_tokens)
            there_and_back(job, back, codec, total, states=name.endswith("+states"))
            tokens = self.decode(back, last)
            same = [a == b for a, b in zip(tokens, expected, strict=True)]
            equal.append(statistics.mean(same))
            if all(same):
                steps.append(1.0)
                continue
            diverged.append(same.index(False))
            forced = self.decode(back, last, expected)
            steps.append(statistics.mean(a == b for a, b in zip(forced, expected, strict=True)))
        gigabytes = total.plain / 1e9
        return CompressionRow(
            model=self.name,
            dtype=self.engine.layout.dtype,
            codec=name,
            megabytes=round(total.plain / 1e6, 2),
            ratio=round(total.plain / total.coded, 3),
            attention_ratio=round(total.attention_plain / total.attention_coded, 3),
            encode_gb_per_cpu_s=round(gigabytes / total.encode_s, 3),
            decode_gb_per_cpu_s=round(gigabytes / total.decode_s, 3),
            cpu_s_per_gb=round((total.encode_s + total.decode_s) / gigabytes, 2),
            rms_error=round(float(np.sqrt(total.squared_errors / total.squares)), 5),
            prompts_equal=round(statistics.mean(share == 1.0 for share in equal), 3),
            tokens_equal=round(statistics.mean(equal), 4),
            steps_equal=round(statistics.mean(steps), 4),
            first_divergence_median=statistics.median(diverged) if diverged else None,
        )


def tiny(architecture: str, args: argparse.Namespace, folder: Path) -> Subject:
    directory = folder / architecture
    with redirect_stdout(sys.stderr):  # what it has built
        build_model(architecture, directory)
    engine = EmbeddedEngine.load_directory(directory, threads=args.threads)
    rng = np.random.default_rng(args.seed)
    shape = (args.prompts, args.tokens)
    prompts = rng.integers(FIRST_PLAIN_TOKEN, engine.vocab_size, shape).tolist()
    return Subject(architecture, engine, prompts, args.output)


def real(directory: Path, args: argparse.Namespace) -> Subject:
    from transformers import AutoTokenizer

    engine = EmbeddedEngine.load_directory(directory, threads=args.threads)
    ids = AutoTokenizer.from_pretrained(str(directory)).encode(args.text.read_text())
    need = args.prompts * args.tokens
    if len(ids) < need:
        raise SystemExit(f"{args.text} has {len(ids)} tokens, {need} are needed")
    prompts = [ids[i * args.tokens : (i + 1) * args.tokens] for i in range(args.prompts)]
    return Subject(directory.name, engine, prompts, args.output)


def table(rows: Sequence[CompressionRow]) -> str:
    lines = [
        "| model | codec | ratio | attention | encode, decode (GB per CPU-s) | CPU-s/GB | rms error "
        "| prompts equal | tokens equal | steps equal | first divergence |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        at = "–" if row.first_divergence_median is None else f"{row.first_divergence_median:g}"
        speed = f"{row.encode_gb_per_cpu_s:.2f}, {row.decode_gb_per_cpu_s:.2f}"
        lines.append(
            f"| {row.model} ({row.dtype}) | {row.codec} | {row.ratio:.2f} | {row.attention_ratio:.2f} | {speed} "
            f"| {row.cpu_s_per_gb:.1f} | {row.rms_error:.2%} | {row.prompts_equal:.0%} | {row.tokens_equal:.1%} "
            f"| {row.steps_equal:.1%} | {at} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", default=list(ARCHITECTURES), help="tiny architectures, smollm2, directories"
    )
    parser.add_argument("--codecs", nargs="+", default=list(CODECS), choices=list(CODECS))
    parser.add_argument("--tokens", type=int, default=513, help="of each prompt")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--output", type=int, default=32, help="tokens to decode")
    parser.add_argument("--text", type=Path, default=Path("docs/design/transport.md"), help="prompts of real models")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows: list[CompressionRow] = []
    with tempfile.TemporaryDirectory() as folder:
        for model in args.models:
            if model in ARCHITECTURES:
                subject = tiny(model, args, Path(folder))
            else:
                subject = real(smollm2() if model == "smollm2" else Path(model), args)
            rows += [subject.row(name, CODECS[name]) for name in args.codecs]
    print(json.dumps([asdict(row) for row in rows], indent=1) if args.json else table(rows))


if __name__ == "__main__":
    main()

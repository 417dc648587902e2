"""Malformed bodies and streams, in all dialects, against a gateway in this process: by a seed, and so many of them.

Right is: no status 500, errors in the dialect's shape, answers that end and say something. Nothing is left on a node or under
way, and the gateway logs no error of its own. `python -m tests.gateway.fuzz --inputs 20000 --seed 7`
"""

import argparse
import asyncio
import json
import logging
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from gateway.api.dialects.anthropic_response import MessagesTranslator
from gateway.api.dialects.responses_response import ResponsesTranslator
from gateway.api.usage import UsagePatch
from gateway.errors import ApiError
from gateway.pipeline.fanout import Merged
from tests.gateway.fuzz_bodies import BODIES
from tests.gateway.worlds import PATIENCE_S, World, world

ODD: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    128,
    129,
    2**31,
    2**63,
    -(2**63) - 1,
    2**80,
    0.5,
    -0.0,
    1e308,
    5e-324,
    "",
    " ",
    "x",
    "\ud800",
    "\0",
    "a" * 5000,
    "🎉" * 50,
    [],
    {},
    [None],
    [[]],
    [[1]],
    ["a", 1],
    {"": None},
    {"type": "text"},
    {"type": "text", "text": None},
    [{}],
    {"mode": "explicit", "end": 3, "said": "x"},
    {"type": "ephemeral", "ttl": "2h"},
    "none",
    "auto",
    "required",
    {"type": "function"},
]
NAMES = sorted(
    {name for body in BODIES.values() for name in body}
    | {
        "continue_final_message",
        "add_generation_prompt",
        "documents",
        "prompt_logprobs",
        "truncation_side",
        "cache_control",
        "guided_json",
    }
    | {
        "add_special_tokens",
        "reasoning_effort",
        "kv_transfer_params",
        "token_ids",
        "functions",
        "role",
        "content",
        "type",
        "id",
    }
)
DEPTHS = (20, 100, 300, 900, 2000)
ENDS = (("[", "]"), ('{"a":', "}"))
DEADLINE_S = PATIENCE_S
MAX_BODY_BYTES = 200_000


@dataclass(frozen=True)
class Nested:
    """A value of so many levels, of lists or objects."""

    depth: int
    opening: str
    closing: str

    def __str__(self) -> str:
        return self.opening * self.depth + "1" + self.closing * self.depth


def odd(rng: random.Random) -> Any:
    """A value that is seldom meant."""
    return (
        Nested(rng.choice(DEPTHS), *rng.choice((("[", "]"), ('{"a":', "}"))))
        if rng.random() < 0.08
        else rng.choice(ODD)
    )


def changed(value: Any, rng: random.Random) -> Any:
    """`value` with one place of it otherwise."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        said = dict(value)
        name = rng.choice(list(said))
        how = rng.random()
        if how < 0.15:
            del said[name]
        elif how < 0.35:
            said[rng.choice(NAMES)] = odd(rng)
        else:
            said[name] = changed(said[name], rng)
        return said
    if isinstance(value, list) and value and rng.random() < 0.85:
        several = list(value)
        place = rng.randrange(len(several))
        how = rng.random()
        if how < 0.15:
            several.insert(place, odd(rng))
        elif how < 0.25:
            several *= rng.choice((2, 30))
        elif how < 0.35:
            del several[place]
        else:
            several[place] = changed(several[place], rng)
        return several
    return odd(rng)


def written(value: Any) -> bytes:
    """As JSON."""

    def text(each: Any) -> str:
        if isinstance(each, dict):
            return "{" + ",".join(f"{json.dumps(name)}:{text(item)}" for name, item in each.items()) + "}"
        if isinstance(each, list):
            return "[" + ",".join(map(text, each)) + "]"
        return str(each) if isinstance(each, Nested) else json.dumps(each)

    return text(value).encode("utf-8", "surrogatepass")


def body(rng: random.Random, path: str) -> bytes:
    """A body for `path`, a little or quite wrong."""
    value: Any = BODIES[path]
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3, 6))):
        value = changed(value, rng)
    data = written(value)
    how = rng.random()
    if how < 0.03:
        data = data[: rng.randrange(len(data) + 1)]
    elif how < 0.06 and data:
        place = rng.randrange(len(data))
        data = data[:place] + rng.randbytes(rng.randrange(1, 4)) + data[place + rng.randrange(3) :]
    elif how < 0.07:
        data = b"[" * rng.choice(DEPTHS)
    return data[:MAX_BODY_BYTES]


def deep(value: Any, put: Any) -> Iterator[Any]:
    """`value` with `put` in the place of each thing in it, one after the other."""
    yield put
    for name, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        for changed_item in deep(item, put):
            several = value.copy()
            several[name] = changed_item
            yield several


def delta(rng: random.Random) -> dict[str, Any]:
    """A part of a chat's answer, as engines say it, or a little otherwise."""
    call: dict[str, Any] = {
        "index": rng.choice((0, 0, 1, None, 7)),
        "function": {"arguments": rng.choice(("{", "}", '"a"', None))},
    }
    if rng.random() < 0.5:
        call |= {"id": "c1", "function": call["function"] | {"name": "look"}}
    said: dict[str, Any] = rng.choice(
        (
            {"content": rng.choice(("a", " b", "", "🎉", None))},
            {"reasoning": "hm"},
            {"reasoning_content": "hm"},
            {"refusal": "no"},
            {"role": "assistant", "content": ""},
            {"tool_calls": [call]},
            {"tool_calls": None},
            {},
        )
    )
    if rng.random() < 0.1:
        said = {name: odd_of_engines(rng) for name in said}
    return said


def odd_of_engines(rng: random.Random) -> Any:
    value = rng.choice(ODD)
    return "x" if value == "\ud800" else value


@dataclass
class Found:
    """What came of the inputs so far, and what was wrong."""

    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def fault(self, what: str, data: bytes) -> None:
        self.wrong.append(f"{what}: {data[:600]!r}")


def check_error(found: Found, path: str, status: int, said: bytes, data: bytes) -> None:
    """Whether an error has its dialect's shape."""
    try:
        error = json.loads(said)
        fine = isinstance(error["error"]["message"], str) and bool(error["error"]["message"])
        fine = fine and (error.get("type") == "error") == path.startswith("/v1/messages")
    except (ValueError, KeyError, TypeError):
        fine = False
    if not fine:
        found.fault(f"{path} {status} without shape {said[:200]!r}", data)


def check_answer(found: Found, path: str, kind: str, said: bytes, data: bytes) -> None:
    """Whether an answer says something, and ends."""
    if "event-stream" not in kind:
        try:
            fine = bool(json.loads(said))
        except ValueError:
            fine = False
    else:
        last = said.rstrip().rpartition(b"\n\n")[2]
        is_over = last == b"data: [DONE]" or any(
            end in last for end in (b"message_stop", b"response.completed", b"response.incomplete")
        )
        fine = b"error" in last or (is_over and said.count(b"data: ") > 1)
        fine = fine and not any(
            event.startswith(b"data: ") and not is_json(event[6:]) for event in said.split(b"\n\n")[:-1]
        )
    if not fine:
        found.fault(f"{path} an answer that says nothing, or does not end {said[-200:]!r}", data)


def is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except ValueError:
        return data == b"[DONE]"
    return True


async def ask(w: World, rng: random.Random, found: Found, path: str, data: bytes) -> None:
    """One input."""
    for node in w.nodes.decode:
        node.script.deltas = tuple(delta(rng) for _ in range(rng.randrange(5)))
        node.script.finish_reason = rng.choice(("stop", "length", "tool_calls", "abort", "content_filter"))
    try:
        async with (
            asyncio.timeout(DEADLINE_S),
            w.http.post(path, data=data, headers={"Content-Type": "application/json"}) as answer,
        ):
            said, kind = await answer.read(), answer.headers.get("Content-Type", "")
    except TimeoutError:
        return found.fault(f"{path} hangs", data)
    except aiohttp.ClientError as error:
        return found.fault(f"{path} breaks off: {error!r}", data)
    found.statuses[f"{path} {answer.status}"] += 1
    if answer.status == 500:
        found.fault(f"{path} 500", data)
    if answer.status != 200:
        return check_error(found, path, answer.status, said, data)
    return check_answer(found, path, kind, said, data)


class Errors(logging.Handler):
    """Tracebacks in the log."""

    def __init__(self, found: Found) -> None:
        super().__init__(logging.WARNING)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.name.startswith(("prfaas", "asyncio", "aiohttp")):
            self._found.wrong.append(f"a traceback: {record.getMessage()} {record.exc_info[1]!r}")


async def bodies(inputs: int, seed: int, found: Found) -> None:
    """So many bodies, and as many that are deep in one place, one after the other."""
    rng = random.Random(seed)
    nests = [Nested(depth, *ends) for depth in DEPTHS for ends in ENDS]
    depths = [(path, value) for path, whole in BODIES.items() for nest in nests for value in deep(whole, nest)]
    depths = rng.sample(depths, min(inputs, len(depths)))
    handler = Errors(found)
    logging.getLogger().addHandler(handler)
    try:
        async with world() as w:
            for _ in range(inputs):
                path = rng.choice(list(BODIES))
                await ask(w, rng, found, path, body(rng, path))
            for path, value in depths:
                await ask(w, rng, found, path, written(value))
            await w.settled()
            await w.idle()
            lines = [
                line for line in (await w.metrics()).splitlines() if line.startswith("prfaas_unforeseen_errors_total{")
            ]
            found.wrong += lines
    finally:
        logging.getLogger().removeHandler(handler)


def events(rng: random.Random) -> bytes:
    """A stream as an engine may say it."""
    told = []
    for _ in range(rng.randrange(8)):
        choice: dict[str, Any] = {"index": 0, "delta": delta(rng)} | rng.choice(
            ({}, {"finish_reason": "stop"}, {"logprobs": None})
        )
        value: Any = {"id": "x", "choices": [choice]}
        if rng.random() < 0.15:
            value = {
                "choices": [],
                "usage": rng.choice(({"prompt_tokens": 3, "completion_tokens": 2}, {}, None, odd_of_engines(rng))),
            }
        if rng.random() < 0.08:
            value = {"error": rng.choice(({"message": "no", "code": 3}, {}, "no", None))}
        if rng.random() < 0.05:
            value = odd_of_engines(rng)
        told.append(b"data: " + json.dumps(value).encode())
    if rng.random() < 0.8:
        told.append(b"data: [DONE]")
    data = b"\n\n".join([*told, b""])
    if rng.random() < 0.2 and data:
        place = rng.randrange(len(data))
        data = data[:place] + rng.randbytes(2) + data[place + rng.randrange(3) :]
    return data


def pieces(data: bytes, rng: random.Random) -> list[bytes]:
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(6)))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True) if start < end]


class _Silent:
    """The reply of a merged stream."""

    def offer(self, data: bytes) -> bool:
        return False

    def probed_by(self, probe: Callable[[], None] | None) -> None:
        pass

    async def write_eof(self, data: bytes = b"") -> None:
        pass


def streams(inputs: int, seed: int, found: Found) -> None:
    """So many streams of engines, told in each dialect: an ApiError is the only exception."""
    rng = random.Random(seed)
    for number in range(inputs):
        data = events(rng)
        cut = pieces(data, rng)
        tellings = (MessagesTranslator("i", "m", 3), ResponsesTranslator("i", "m", b'{"tools":[]}', 5))
        for telling in tellings:
            told = b""
            try:
                for piece in cut:
                    told += telling.events(piece)
                told += telling.end()
            except ApiError as error:
                told += telling.failure(error)
            except Exception as error:
                found.fault(f"stream {number}: {type(telling).__name__} {error!r}", data)
                continue
            if not told.endswith(b"\n\n") or not told.strip():
                found.fault(f"stream {number}: {type(telling).__name__} says nothing", data)
        merged = Merged(1, 1, streams=True, with_usage=True, begin=lambda headers, length: _Silent())  # type: ignore[arg-type, return-value]
        part = merged.part(0, 200, {})
        try:
            for piece in cut:
                part.offer(piece)
            asyncio.run(_ended(merged))
        except ApiError:
            pass
        except Exception as error:
            found.fault(f"stream {number}: merged {error!r}", data)
        asyncio.run(_patched(cut, number, data, found))


async def _ended(merged: Merged) -> None:
    await merged.end()


async def _patched(cut: list[bytes], number: int, data: bytes, found: Found) -> None:
    left = [*cut, b""]

    async def read() -> bytes:
        return left.pop(0) if left else b""

    async def cached() -> int:
        return 2

    patch = UsagePatch(read, cached)
    try:
        while await patch.read():
            pass
    except Exception as error:
        found.fault(f"stream {number}: usage {error!r}", data)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    logging.disable(logging.INFO)
    found = Found()
    asyncio.run(bodies(asked.inputs, asked.seed, found))
    streams(asked.inputs, asked.seed, found)
    for status, count in sorted(found.statuses.items()):
        print(f"{count:7} {status}")
    alike = {re.sub(r"[0-9]+|b'.*", "", wrong)[:80]: wrong for wrong in reversed(found.wrong)}
    for wrong in alike.values():
        print("WRONG", wrong)
    print(f"{asked.inputs} bodies and as many streams, seed {asked.seed}: {len(found.wrong)} wrong")
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""Parts B and D: what two servers answer and move, and what becomes of it when the first is killed."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from hybrid_cache.layout.layout import ModelLayout
from tests.e2e.harness import Bench
from tests.gpu.answers import ANSWER_S, SingleServer, complaints, equal_until, timed
from tests.gpu.settings import OTHER_KERNELS, Setting, length_inside, lengths_at_blocks, moved_bytes
from transport.control.proto import node_pb2 as pb

POLL_S: Final = 0.02
LOADED: Final = "vllm:external_prefix_cache_hits_total"
LEGS: Final = 3  # so many that a kill comes in the middle of one
Found = tuple[list[str], dict[str, Any]]  # why a part has failed, and its figures


async def equality(bench: Bench, setting: Setting, model: str) -> Found:
    """Part B for one model: tokens of two servers are those of one, and what crosses is what the layout says."""
    server = SingleServer(bench.session, bench.node("decode0").engine_url)
    layout = await _layout(bench)
    rows = []
    for number, length in enumerate(lengths_at_blocks(setting.lengths, layout.block_size)):
        prompt = bench.prompt(length, seed=1000 + number)
        expected, cached = await server.stepped(prompt, setting.tokens)
        again, _ = await server.stepped(prompt, setting.tokens)
        said: dict[str, Any] = {"judged": True, "cut": "alike"}
        if cached != length - 1:  # a state there is not kept: the answer's own first token is computed by itself
            start = prompt[:-1]
            prompt, expected = await server.going_on(start, setting.tokens)
            _, again = await server.going_on(start, setting.tokens)
            said = {
                "judged": model not in OTHER_KERNELS,
                "cut": f"its cache had {cached} tokens: by its own first token",
            }
        rows.append(await _row(bench, layout, prompt, expected, again) | said)
    start = bench.prompt(length_inside(setting.lengths, layout.block_size) - 1, seed=999)
    prompt, expected = await server.going_on(start, setting.tokens)
    _, again = await server.going_on(start, setting.tokens)
    inside = await _row(bench, layout, prompt, expected, again)
    rows.append(inside | {"judged": model not in OTHER_KERNELS, "cut": OTHER_KERNELS.get(model, "alike")})
    wrong = [each for row in rows for each in complaints(row)]
    wrong += [] if any(row["judged"] for row in rows) else ["no prompt was cut alike, so no tokens were compared"]
    depends = await _depends_on_its_beginning(bench, server, rows[0]["tokens"], setting.tokens)
    if not depends:
        wrong.append("the answer does not depend on how the prompt begins, so equal tokens show nothing")
    return wrong, {"block": layout.block_size, "depends_on_beginning": depends, "prompts": rows}


async def _row(
    bench: Bench, layout: ModelLayout, prompt: Sequence[int], expected: list[int], again: list[int]
) -> dict[str, Any]:
    """By way of two servers, beside what one answers each of two times."""
    name = bench.name()
    before = await _loaded_tokens(bench)
    answer = await timed(bench.session, bench.system.api_url, prompt, len(expected), name)
    record = await bench.record(name)
    return {
        "tokens": len(prompt),
        "loaded": await _loaded_tokens(bench) - before,
        "equal": equal_until(answer.tokens, expected),
        "repeats": equal_until(again, expected),
        "of": len(expected),
        "bytes": record["bytes"],
        "layout": moved_bytes(layout, len(prompt)),
        "route": record["route"],
        "fallbacks": record["fallbacks"],
    }


async def _loaded_tokens(bench: Bench) -> int:
    """What vLLM itself counts of prompts that a connector brought. A server that computes them all has the right answer, too."""
    return int(await bench.metric(await bench.engine_url("decode0"), LOADED))


async def _depends_on_its_beginning(bench: Bench, server: SingleServer, length: int, tokens: int) -> bool:
    """Whether another first half of a prompt has another answer: what a wrong KVCache would do, too."""
    prompt, other = bench.prompt(length, seed=1000), bench.prompt(length, seed=2000)
    half = length // 2
    return await server.whole(prompt, tokens) != await server.whole([*other[:half], *prompt[half:]], tokens)


async def killed(bench: Bench, setting: Setting, _: str) -> Found:
    """Part D: the server that prefills is killed in the middle of legs; answers are right, and the next leg is its own."""
    server = SingleServer(bench.session, bench.node("decode0").engine_url)
    (length,) = lengths_at_blocks((setting.killed_length,), (await _layout(bench)).block_size)
    prompts = [bench.prompt(length, seed=77 + number) for number in range(LEGS)]
    expected = [await _answers(server, prompt, setting.tokens) for prompt in prompts]
    engine, names = engine_of(await bench.describe("far")), [bench.name() for _ in prompts]
    tasks = [
        asyncio.create_task(timed(bench.session, bench.system.api_url, prompt, setting.tokens, name))
        for prompt, name in zip(prompts, names, strict=True)
    ]
    await _until(lambda: _is_busy(bench, tasks))
    open_legs = sum(not task.done() for task in tasks)
    os.kill(engine, signal.SIGKILL)
    killed_s = time.monotonic()
    answers = await asyncio.gather(*tasks)
    fallbacks = [(await bench.record(name))["fallbacks"] for name in names]
    pairs = zip(answers, expected, strict=True)
    wrong = [f"answer {at} has other tokens" for at, (a, b) in enumerate(pairs) if not is_one_of(a.tokens, b)]
    wrong += [] if open_legs else ["the answers were there before their server was killed"]
    await _until(lambda: _is_back(bench, engine), setting.start_s)
    figures: dict[str, Any] = {"ready_again_s": round(time.monotonic() - killed_s, 1), "fallbacks": fallbacks}
    prompt, name = bench.prompt(length, seed=76), bench.name()
    answer = await timed(bench.session, bench.system.api_url, prompt, setting.tokens, name)
    record = await bench.record(name)
    figures["after"] = {"route": record["route"], "bytes": record["bytes"], "fallbacks": record["fallbacks"]}
    if not is_one_of(answer.tokens, await _answers(server, prompt, setting.tokens)):
        wrong.append("afterwards the answer has other tokens")
    if record["fallbacks"] or not record["bytes"]:
        wrong.append(f"afterwards nothing is prefilled remotely: {record['fallbacks']}")
    return wrong, figures | {"open_legs": open_legs}


def engine_of(description: pb.NodeDescription) -> int:
    """The process of a node's engine. Raises RuntimeError where it has no engine: a signal to 0 is one to all of our own."""
    if not description.engine_pid:
        raise RuntimeError(f"{description.node_id} has no engine to kill: it ended by itself")
    return description.engine_pid


def is_one_of(found: Sequence[int], expected: Sequence[Sequence[int]]) -> bool:
    """Whether an answer is one of these, or like one as far as they do not depend on where a prompt is cut."""
    alike = min(equal_until(expected[0], other) for other in expected)
    return alike > 0 and max(equal_until(found, other) for other in expected) >= alike


async def _answers(server: SingleServer, prompt: Sequence[int], tokens: int) -> list[list[int]]:
    """What one server answers: cut as two servers cut, and as it cuts itself, which is what a lost leg leaves."""
    stepped, _ = await server.stepped(prompt, tokens)
    return [stepped, await server.whole(prompt, tokens)]


async def _layout(bench: Bench) -> ModelLayout:
    return ModelLayout.from_json((await bench.describe("decode0")).layout_json)


async def _is_busy(bench: Bench, tasks: Sequence["asyncio.Task[Any]"]) -> bool:
    load = (await bench.describe("far")).load
    return all(task.done() for task in tasks) or bool(load.sending or load.running)


async def _is_back(bench: Bench, engine: int) -> bool:
    if (await bench.describe("far")).engine_pid in (0, engine):
        return False
    return await bench.gateway_sees("far") == "ready"


async def _until(holds: Callable[[], Awaitable[bool]], limit_s: float = ANSWER_S) -> None:
    async with asyncio.timeout(limit_s):
        while True:
            if await holds():
                return
            await asyncio.sleep(POLL_S)

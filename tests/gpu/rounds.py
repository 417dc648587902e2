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

POLL_S: Final = 0.02
Found = tuple[list[str], dict[str, Any]]  # why a part has failed, and its figures


async def equality(bench: Bench, setting: Setting, model: str) -> Found:
    """Part B for one model: tokens of two servers are those of one, and what crosses is what the layout says."""
    server = SingleServer(bench.session, bench.node("decode0").engine_url)
    layout = await _layout(bench)
    wrong, rows = [], []
    for number, length in enumerate(lengths_at_blocks(setting.lengths, layout.block_size)):
        prompt = bench.prompt(length, seed=1000 + number)
        expected, cached = await server.stepped(prompt, setting.tokens)
        again, _ = await server.stepped(prompt, setting.tokens)
        row = await _row(bench, layout, prompt, expected, again)
        row["cut"] = "alike" if cached == length - 1 else f"{cached} of {length - 1} tokens were cached"
        if cached != length - 1:
            wrong.append(f"{length} tokens: one server did not cut the prompt where two do: {row['cut']}")
        rows.append(row | {"judged": cached == length - 1})
    start = bench.prompt(length_inside(setting.lengths, layout.block_size) - 1, seed=999)
    prompt, expected = await server.going_on(start, setting.tokens)
    _, again = await server.going_on(start, setting.tokens)
    inside = await _row(bench, layout, prompt, expected, again)
    rows.append(inside | {"judged": model not in OTHER_KERNELS, "cut": OTHER_KERNELS.get(model, "alike")})
    wrong += [each for row in rows for each in complaints(row)]
    depends = await _depends_on_its_beginning(bench, server, rows[0]["tokens"], setting.tokens)
    if not depends:
        wrong.append("the answer does not depend on how the prompt begins, so equal tokens show nothing")
    return wrong, {"block": layout.block_size, "depends_on_beginning": depends, "prompts": rows}


async def _row(
    bench: Bench, layout: ModelLayout, prompt: Sequence[int], expected: list[int], again: list[int]
) -> dict[str, Any]:
    """By way of two servers, beside what one answers each of two times."""
    name = bench.name()
    answer = await timed(bench.session, bench.system.api_url, prompt, len(expected), name)
    record = await bench.record(name)
    return {
        "tokens": len(prompt),
        "equal": equal_until(answer.tokens, expected),
        "repeats": equal_until(again, expected),
        "of": len(expected),
        "bytes": record["bytes"],
        "layout": moved_bytes(layout, len(prompt)),
        "route": record["route"],
        "fallbacks": record["fallbacks"],
    }


async def _depends_on_its_beginning(bench: Bench, server: SingleServer, length: int, tokens: int) -> bool:
    """Whether another first half of a prompt has another answer: what a wrong KVCache would do, too."""
    prompt, other = bench.prompt(length, seed=1000), bench.prompt(length, seed=2000)
    half = length // 2
    return await server.whole(prompt, tokens) != await server.whole([*other[:half], *prompt[half:]], tokens)


async def killed(bench: Bench, setting: Setting, _: str) -> Found:
    """Part D: the server that prefills is killed in the middle of a leg; the answer is right, and the next leg is its own."""
    server = SingleServer(bench.session, bench.node("decode0").engine_url)
    lengths = (*setting.lengths, *setting.timed_lengths)
    length = lengths_at_blocks(lengths, (await _layout(bench)).block_size)[-1]
    prompt, name = bench.prompt(length, seed=77), bench.name()
    expected, engine = await _answers(server, prompt, setting.tokens), (await bench.describe("far")).engine_pid
    task = asyncio.create_task(timed(bench.session, bench.system.api_url, prompt, setting.tokens, name))
    await _until(lambda: _is_busy(bench, task))
    is_late = task.done()
    os.kill(engine, signal.SIGKILL)
    killed_s = time.monotonic()
    answer, record = await task, await bench.record(name)
    wrong = [] if answer.tokens in expected else ["the answer has other tokens"]
    wrong += ["the answer was there before its server was killed"] if is_late else []
    await _until(lambda: _is_back(bench, engine), setting.start_s)
    figures: dict[str, Any] = {"ready_again_s": round(time.monotonic() - killed_s, 1), "fallbacks": record["fallbacks"]}
    prompt, name = bench.prompt(length, seed=78), bench.name()
    answer = await timed(bench.session, bench.system.api_url, prompt, setting.tokens, name)
    record = await bench.record(name)
    figures["after"] = {"route": record["route"], "bytes": record["bytes"], "fallbacks": record["fallbacks"]}
    if answer.tokens not in await _answers(server, prompt, setting.tokens):
        wrong.append("afterwards the answer has other tokens")
    if record["fallbacks"] or not record["bytes"]:
        wrong.append(f"afterwards nothing is prefilled remotely: {record['fallbacks']}")
    return wrong, figures


async def _answers(server: SingleServer, prompt: Sequence[int], tokens: int) -> list[list[int]]:
    """What one server answers: cut as two servers cut, and as it cuts itself, which is what a lost leg leaves."""
    stepped, _ = await server.stepped(prompt, tokens)
    return [stepped, await server.whole(prompt, tokens)]


async def _layout(bench: Bench) -> ModelLayout:
    return ModelLayout.from_json((await bench.describe("decode0")).layout_json)


async def _is_busy(bench: Bench, task: "asyncio.Task[Any]") -> bool:
    load = (await bench.describe("far")).load
    return task.done() or bool(load.sending or load.running)


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

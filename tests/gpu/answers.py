"""Answers, timed; those that one server gives for a prompt that is cut where two servers cut it; and two sets of times."""

import json
import statistics
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from tests.gpu.settings import NAME

ANSWER_S: Final = 120.0
LEAST_PREFILL: Final = 0.97  # of a plain server's rate
MOST_ITL_P50, MOST_ITL_P99 = 1.03, 1.10  # of a plain server's
LEAST_OVERLAP: Final = 0.9  # of bytes that leave before the prefill ends, at the longest prompt


@dataclass(frozen=True)
class TimedAnswer:
    """An answer's tokens and when each event with some came, from the question on. `cached`: tokens not computed."""

    tokens: list[int]
    came_s: list[float]
    cached: int = 0

    @property
    def ttft_s(self) -> float:
        return self.came_s[0]

    @property
    def intervals_s(self) -> list[float]:
        return [after - before for before, after in zip(self.came_s, self.came_s[1:], strict=False)]


async def timed(
    session: aiohttp.ClientSession, url: str, prompt: Sequence[int], tokens: int, name: str = "", **extra: Any
) -> TimedAnswer:
    body = {
        "model": NAME, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True,
    }  # fmt: skip
    began_s, found, came_s, cached = time.monotonic(), list[int](), list[float](), 0
    limit = aiohttp.ClientTimeout(total=ANSWER_S)
    headers = {"x-request-id": name or uuid.uuid4().hex}
    async with session.post(f"{url}/v1/completions", json=body | extra, headers=headers, timeout=limit) as answer:
        if answer.status != 200:
            raise RuntimeError(f"{url}: HTTP {answer.status}: {(await answer.text())[:300]}")
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            ids = [token for choice in event.get("choices") or () for token in choice.get("token_ids") or ()]
            if ids:
                found += ids
                came_s.append(time.monotonic() - began_s)
            cached = ((event.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens") or cached
    if not found:
        raise RuntimeError(f"{url}: an answer without tokens")
    return TimedAnswer(found, came_s, cached)


class SingleServer:
    """One server's answers. With a salt that no gateway gave, the connector leaves a prompt alone."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def whole(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """As it cuts a prompt itself."""
        return (await self._ask(prompt, tokens, uuid.uuid4().hex)).tokens

    async def stepped(self, prompt: Sequence[int], tokens: int) -> tuple[list[int], int]:
        """All but the last token first, then the whole, from its own prefix cache: cut as a leg and a landing are.

        Says, too, how much of the prompt it had cached: where that is not all but one, it was cut elsewhere.
        """
        salt = uuid.uuid4().hex
        await self._ask(prompt[:-1], 1, salt)
        answer = await self._ask(prompt, tokens, salt)
        return answer.tokens, answer.cached

    async def going_on(self, prompt: Sequence[int], tokens: int) -> tuple[list[int], list[int]]:
        """A prompt that ends with the answer's first token, and the rest of the answer.

        So the prompt's last token was computed by itself, at any length, as behind a landing.
        """
        found = (await self._ask(prompt, tokens + 1, uuid.uuid4().hex)).tokens
        return [*prompt, found[0]], found[1:]

    async def _ask(self, prompt: Sequence[int], tokens: int, salt: str) -> TimedAnswer:
        return await timed(self._session, self._url, prompt, tokens, cache_salt=salt)


def equal_until(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens two answers begin with alike."""
    pairs = zip(ours, theirs, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


def complaints(row: dict[str, Any]) -> list[str]:
    """What is wrong with a row of part B. A server that does not repeat itself is only asked for what it does repeat."""
    found = []
    if row["equal"] < row["repeats"] and row["judged"]:
        found.append(f"the answers part at token {row['equal']}")
    if row["repeats"] < row["of"] // 2:
        found.append(f"one server parts from itself at token {row['repeats']}, so nothing is shown")
    if row["loaded"] != row["tokens"] - 1:
        found.append(f"vLLM loaded {row['loaded']} of the prompt, and computed the rest itself")
    if row["fallbacks"] or row["bytes"] != row["layout"]:
        found.append(f"{row['bytes']} of {row['layout']} bytes, fallbacks {row['fallbacks']}")
    return [f"{row['tokens']} tokens: {each}" for each in found]


def compared(ours: Sequence[TimedAnswer], theirs: Sequence[TimedAnswer]) -> dict[str, float]:
    """Medians of first tokens; of the intervals between tokens, ours over theirs."""
    ttft_s, plain_s = (statistics.median(each.ttft_s for each in answers) for answers in (ours, theirs))
    mine, other = (sorted(i for each in answers for i in each.intervals_s) for answers in (ours, theirs))
    found = {"ttft_s": ttft_s, "plain_ttft_s": plain_s}
    for name, share in (("itl_p50", 0.5), ("itl_p99", 0.99)) if mine and other else ():
        at = [values[min(len(values) - 1, int(share * len(values)))] for values in (mine, other)]
        found |= {f"{name}_s": at[0], f"plain_{name}_s": at[1], name: at[0] / at[1]}
    return {key: round(value, 5) for key, value in found.items()}


def missed(row: dict[str, Any], *, is_longest: bool) -> list[str]:
    """Which limits a row of part C does not keep."""
    found = [f"prefill at {row['prefill']} of a plain server's rate"] if row["prefill"] < LEAST_PREFILL else []
    for name, limit in (("itl_p50", MOST_ITL_P50), ("itl_p99", MOST_ITL_P99)):
        if name not in row:
            found.append(f"{name} is not known: an answer came at once")
        elif row[name] > limit:
            found.append(f"{name} {row[name]} of a plain server's")
    if is_longest and row["overlap"] < LEAST_OVERLAP:
        found.append(f"overlap {row['overlap']}")
    return [f"{row['tokens']} tokens: {each}" for each in found]

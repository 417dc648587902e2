"""Clients of a fleet: one tenant whose every request must be answered right, one that asks for more than its limit."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Final

import aiohttp

from engine.emulated.emulated import emulated_tokens
from tests.fleet.judgement import outcome_of
from tests.fleet.system import CAPPED_KEY, FREE_KEY

FIRST_TOKEN, LAST_TOKEN = 4, 512
CONVERSATIONS: Final = 24
MOST_PROMPT: Final = 1500  # then a conversation starts anew
MOST_MORE, MOST_OUTPUT = 500, 64
LEAVES_SHARE: Final = 0.08
PATIENCE_S: Final = 120.0  # a request without its answer for so long hangs
PAUSE_S: Final = 0.2
MOST_PRESSING: Final = 16  # at once
PRESS_S: Final = 0.3  # at three gateways, that is ten requests a second of a tenant that may have four


class Load:
    """What clients ask, and what came of it. `urls` are the gateways' now, `killed` those of gateways that were killed."""

    def __init__(self, urls: Callable[[], Sequence[str]], killed: Set[str], rng: random.Random) -> None:
        self._urls, self._killed, self._rng = urls, killed, rng
        self.outcomes: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.let_in = self.capped_asked = 0
        self._conversations: list[list[int]] = [[] for _ in range(CONVERSATIONS)]
        self._count = 0

    async def converse(self, http: aiohttp.ClientSession) -> None:
        """One request after the other, of conversations that grow, at any gateway."""
        while True:
            at = self._rng.randrange(CONVERSATIONS)
            more = self._rng.choices(range(FIRST_TOKEN, LAST_TOKEN), k=self._rng.randint(20, MOST_MORE))
            prompt = [*self._conversations[at], *more]
            output = self._rng.randint(4, MOST_OUTPUT)
            leaves_s = self._rng.uniform(0.05, 1.0) if self._rng.random() < LEAVES_SHARE else None
            outcome = await self.ask(http, prompt, output, leaves_s)
            if outcome == "right":
                grown = [*prompt, *emulated_tokens(prompt, output)]
                self._conversations[at] = grown if len(grown) < MOST_PROMPT else []
            elif outcome != "left":
                await asyncio.sleep(PAUSE_S)

    async def ask(
        self, http: aiohttp.ClientSession, prompt: list[int], output: int, leaves_s: float | None = None
    ) -> str:
        """right, wrong, refused, lost, hung, left, or cut by the gateway's own end."""
        url = self._rng.choice(self._urls())
        self._count += 1
        name = f"fleet-{self._count}"
        body = {"model": "tiny", "prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True}
        why = ""
        try:
            async with asyncio.timeout(leaves_s or PATIENCE_S):
                outcome, why = await _streamed(http, url, body, name)
        except TimeoutError:
            outcome = "left" if leaves_s else "hung"
        if outcome == "lost" and url in self._killed:
            outcome = "cut"
        if outcome == "wrong":
            self.wrong.append(f"{name} at {url}: {why}")
        if outcome not in ("right", "left"):
            self.reasons[f"{outcome}: {''.join('#' if c.isdigit() else c for c in why)[:140]}"] += 1
        self.outcomes[outcome] += 1
        return outcome

    async def press(self, http: aiohttp.ClientSession) -> None:
        """Asks in the name of the tenant that has a limit, for more than that, at all gateways at once."""
        free = asyncio.Semaphore(MOST_PRESSING)
        async with asyncio.TaskGroup() as group:
            while True:
                for url in self._urls():
                    await free.acquire()
                    group.create_task(self._is_let_in(http, url)).add_done_callback(lambda _: free.release())
                await asyncio.sleep(PRESS_S)

    async def use_up(self, http: aiohttp.ClientSession) -> None:
        """Takes what is left of the limit, until every gateway refuses."""
        while any(await asyncio.gather(*(self._is_let_in(http, url) for url in self._urls()))):
            pass

    async def _is_let_in(self, http: aiohttp.ClientSession, url: str) -> bool:
        body = {"model": "tiny", "prompt": [4, 5, 6], "max_tokens": 1}
        headers = {"authorization": f"Bearer {CAPPED_KEY}"}
        self.capped_asked += 1
        try:
            async with asyncio.timeout(PATIENCE_S):
                async with http.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
                    text = await answer.text()
        except (aiohttp.ClientError, TimeoutError) as exc:
            outcome = "cut" if url in self._killed else "lost"
            self.outcomes[outcome] += 1
            self.reasons[f"{outcome}: capped: {exc!r}"] += 1
            return False
        if answer.status not in (200, 429, 503):
            self.outcomes["lost"] += 1
            self.reasons[f"lost: capped: HTTP {answer.status}: {text[:100]}"] += 1
        self.let_in += answer.status == 200
        return answer.status == 200


async def _streamed(http: aiohttp.ClientSession, url: str, body: Mapping[str, Any], name: str) -> tuple[str, str]:
    """What came of a streamed request, and why."""
    asked = {**body, "stream": True, "return_token_ids": True}
    headers = {"authorization": f"Bearer {FREE_KEY}", "x-request-id": name}
    tokens: list[int] = []
    status, is_whole = 0, False
    try:
        async with http.post(f"{url}/v1/completions", json=asked, headers=headers) as answer:
            status = answer.status
            if status != 200:
                return outcome_of(status, False), f"HTTP {status}: {(await answer.text())[:300]}"
            async for line in answer.content:
                is_whole = is_whole or line.strip() == b"data: [DONE]"
                if line.startswith(b"data: ") and not is_whole:
                    event = json.loads(line[6:])
                    if error := event.get("error"):
                        return outcome_of(status, True), f"{len(tokens)} tokens, then {error.get('message')}"
                    tokens += [token for each in event.get("choices") or [] for token in each.get("token_ids") or []]
    except (aiohttp.ClientError, ValueError) as exc:
        return outcome_of(status, True), f"status {status}, {len(tokens)} tokens, then {exc!r}"
    if not is_whole:
        return outcome_of(status, True), f"{len(tokens)} tokens, then the end of the stream"
    expected = emulated_tokens(body["prompt"], body["max_tokens"])
    return ("right", "") if tokens == expected else ("wrong", f"{tokens} instead of {expected}")

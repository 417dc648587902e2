"""Honest requests without end; each must get the right tokens or an error, and soon."""

import asyncio
import json
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np

from prfaas.demo.client import STREAM_TIMEOUT_S, RequestFailed, complete

OUTPUT: Final = 16
CONVERSATIONS, TURNS = 10, 3
FIRST_TOKEN, VOCABULARY = 4, 512
PATIENCE_S: Final = 150.0  # a request without any answer for so long hangs
CANCELLED_SHARE: Final = 0.12
SEVERAL_SHARE: Final = 0.2  # of requests are for several answers
MOST_ANSWERS: Final = 4
PAUSE_S: Final = 0.2  # before the next request when the last one failed: the gateway may be down


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, and the only right answer."""

    prompt: list[int]
    answer: list[int]


def questions(model: Path, seed: int) -> list[Question]:
    """Conversations that grow, some of them beyond the threshold, with the tokens of a plain transformers.generate."""
    from engine.torch.embedded import load_model
    from engine.torch.reference import first_tie, reference_tokens

    reference, rng = load_model(model), np.random.default_rng(seed)
    made = []
    for _ in range(CONVERSATIONS):
        prompt: list[int] = []
        turns = 0
        while turns < TURNS:
            more = [*prompt, *(int(t) for t in rng.integers(FIRST_TOKEN, VOCABULARY, int(rng.integers(20, 700))))]
            answer = reference_tokens(reference, more, OUTPUT)
            if first_tie(reference, more, answer) is not None:
                continue
            made.append(Question(more, answer))
            prompt, turns = [*more, *answer], turns + 1
    return made


async def complete_several(
    session: aiohttp.ClientSession, api_url: str, body: dict[str, Any], request_id: str, headers: Mapping[str, str]
) -> list[list[int]]:
    """The tokens of each of the `n` answers that one streamed call is for. Raises RequestFailed."""
    body = {**body, "stream": True, "return_token_ids": True}
    tokens: dict[int, list[int]] = defaultdict(list)
    is_whole = False
    timeout = aiohttp.ClientTimeout(total=STREAM_TIMEOUT_S)
    headers = {"x-request-id": request_id, **headers}
    try:
        async with session.post(f"{api_url}/v1/completions", json=body, headers=headers, timeout=timeout) as answer:
            if answer.status != 200:
                raise RequestFailed(f"{request_id}: HTTP {answer.status}: {(await answer.text())[:300]}", answer.status)
            async for line in answer.content:
                is_whole = is_whole or line.strip() == b"data: [DONE]"
                if not line.startswith(b"data: ") or is_whole:
                    continue
                event = json.loads(line[6:])
                if error := event.get("error"):
                    raise RequestFailed(f"{request_id}: {error.get('message')}")
                for choice in event.get("choices") or []:
                    tokens[choice["index"]] += choice.get("token_ids") or []
    except (aiohttp.ClientError, TimeoutError, ValueError) as exc:
        raise RequestFailed(f"{request_id}: {exc!r}") from exc
    if not is_whole:
        raise RequestFailed(f"{request_id}: the stream broke off")
    return [tokens[index] for index in range(body["n"])]


class Traffic:
    """Workers that ask in the names of tenants, and what came of it."""

    def __init__(self, api_url: str, asked: Sequence[Question], rng: random.Random, keys: Sequence[str] = ()) -> None:
        """`keys`: tenants', each request being of one of them; without any none is shown."""
        self._api_url = api_url
        self._keys = keys
        self._headers: list[Mapping[str, str]] = [{"authorization": f"Bearer {key}"} for key in keys] or [{}]
        self.asked = asked
        self._rng = rng
        self.outcomes: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._count = 0

    def again(self) -> "Traffic":
        """The same askers, before their first request."""
        return Traffic(self._api_url, self.asked, self._rng, self._keys)

    async def worker(self, session: aiohttp.ClientSession) -> None:
        """Asks one question after another until it is cancelled."""
        while True:
            leaves_after_s = self._rng.uniform(0.0, 1.5) if self._rng.random() < CANCELLED_SHARE else None
            n = self._rng.randint(2, MOST_ANSWERS) if self._rng.random() < SEVERAL_SHARE else 1
            tenant = self._rng.randrange(len(self._headers))
            outcome = await self.ask(session, self._rng.choice(self.asked), leaves_after_s, n=n, tenant=tenant)
            if outcome == "error":
                await asyncio.sleep(PAUSE_S)

    async def ask_all(self, session: aiohttp.ClientSession, *, n: int = 1) -> None:
        """Every question once in the name of each tenant, one after the other."""
        for tenant in range(len(self._headers)):
            for question in self.asked:
                await self.ask(session, question, n=n, tenant=tenant)

    async def ask(
        self,
        session: aiohttp.ClientSession,
        question: Question,
        leaves_after_s: float | None = None,
        *,
        n: int = 1,
        tenant: int = 0,
    ) -> str:
        """right, wrong, error, hung or left."""
        self._count += 1
        name = f"storm-{self._count}"
        headers = self._headers[tenant]
        body = {"model": "tiny", "prompt": question.prompt, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True}
        try:
            async with asyncio.timeout(leaves_after_s or PATIENCE_S):
                if n == 1:
                    answer = await complete(session, self._api_url, body, name, headers)
                    route, answers = answer.route, [answer.token_ids]
                else:
                    route = f"n = {n}"
                    answers = await complete_several(session, self._api_url, body | {"n": n}, name, headers)
            outcome = "right" if answers == [question.answer] * n else "wrong"
            if outcome == "wrong":
                self.wrong.append(f"{name} ({route}): {answers} instead of {question.answer}")
        except RequestFailed as exc:
            outcome = "error"
            self.errors[_shape(str(exc))] += 1
        except TimeoutError:
            outcome = "left" if leaves_after_s else "hung"
        self.outcomes[outcome] += 1
        return outcome


def _shape(error: str) -> str:
    """An error without what differs from request to request."""
    text = error.partition(": ")[2]
    return "".join("#" if char.isdigit() else char for char in text)[:100]

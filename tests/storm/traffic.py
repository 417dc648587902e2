"""Honest requests without end, each of which must get the right tokens or an error, and soon."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp
import numpy as np

from prfaas.client import RequestFailed, complete

OUTPUT: Final = 16
CONVERSATIONS, TURNS = 10, 3
FIRST_TOKEN, VOCABULARY = 4, 512
PATIENCE_S: Final = 150.0  # a request without any answer for so long hangs
CANCELLED_SHARE: Final = 0.12
PAUSE_S: Final = 0.2  # before the next request when the last one failed: the gateway may be down


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, and the only right answer."""

    prompt: list[int]
    answer: list[int]


def questions(model: Path, seed: int) -> list[Question]:
    """Conversations that grow, some of them beyond the threshold, with the tokens of a plain transformers.generate."""
    from engine.model.embedded import load_model
    from engine.model.reference import reference_tokens

    reference, rng = load_model(model), np.random.default_rng(seed)
    made = []
    for _ in range(CONVERSATIONS):
        prompt: list[int] = []
        for _ in range(TURNS):
            prompt = [*prompt, *(int(t) for t in rng.integers(FIRST_TOKEN, VOCABULARY, int(rng.integers(20, 700))))]
            made.append(Question(prompt, reference_tokens(reference, prompt, OUTPUT)))
            prompt = [*prompt, *made[-1].answer]
    return made


class Traffic:
    """Workers that ask, and what came of it."""

    def __init__(self, api_url: str, asked: Sequence[Question], rng: random.Random) -> None:
        self._api_url = api_url
        self.asked = asked
        self._rng = rng
        self.outcomes: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._count = 0

    async def worker(self, session: aiohttp.ClientSession) -> None:
        """Asks one question after another until it is cancelled."""
        while True:
            leaves_after_s = self._rng.uniform(0.0, 1.5) if self._rng.random() < CANCELLED_SHARE else None
            outcome = await self.ask(session, self._rng.choice(self.asked), leaves_after_s)
            if outcome == "error":
                await asyncio.sleep(PAUSE_S)

    async def ask(self, session: aiohttp.ClientSession, question: Question, leaves_after_s: float | None = None) -> str:
        """right, wrong, error, hung or left."""
        self._count += 1
        name = f"storm-{self._count}"
        body = {"model": "tiny", "prompt": question.prompt, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True}
        try:
            async with asyncio.timeout(leaves_after_s or PATIENCE_S):
                answer = await complete(session, self._api_url, body, name)
            outcome = "right" if answer.token_ids == question.answer else "wrong"
            if outcome == "wrong":
                self.wrong.append(f"{name} ({answer.route}): {answer.token_ids} instead of {question.answer}")
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

"""Two models of different architectures and vocabularies behind one gateway: tokens, caches, outages, joining and leaving."""

import asyncio
import dataclasses
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.torch.embedded import load_model
from engine.torch.reference import TIE, closest_routing, first_tie, reference_tokens
from engine.torch.tiny import build_model
from prfaas.demo.client import DemoCompletion, RequestFailed, complete
from prompts.tokens.tokenizer import TextTokenizer
from tests.conftest import Models
from tests.e2e.harness import UNTIED_TRIES, Bench

pytestmark = pytest.mark.e2e

OTHER = "other"
GRACE_S = 3.0
MAX_TOKENS = 12
WORDS = ("alone", "before", "candle", "during", "every", "frozen", "garden", "hollow", "island", "journey", "kitchen")


def with_other_vocabulary(directory: Path) -> None:
    """Has all plain tokens of the model in `directory` stand for something else than before."""
    path = directory / "tokenizer.json"
    document = json.loads(path.read_text())
    vocabulary, special = document["model"]["vocab"], {each["content"] for each in document["added_tokens"]}
    plain = sorted((token for token in vocabulary if token not in special), key=vocabulary.__getitem__)
    numbers = [vocabulary[token] for token in plain]
    document["model"]["vocab"] = vocabulary | dict(zip(plain, reversed(numbers), strict=True))
    path.write_text(json.dumps(document))


class Yardstick:
    """What a model says by itself."""

    def __init__(self, directory: Path) -> None:
        self._model = load_model(directory)
        self._tokenizer = TextTokenizer.load(directory)

    def encoded(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text)]

    def said(self, text: str) -> list[int] | None:
        """Its answer to `text`; None if that depends on the order of sums."""
        prompt = self.encoded(text)
        tokens: list[int] = reference_tokens(self._model, prompt, MAX_TOKENS)
        if first_tie(self._model, prompt, tokens) is not None:
            return None
        return tokens if closest_routing(self._model, [*prompt, *tokens]) >= TIE else None


def text_of(seed: int, words: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


class TwoModels:
    """The system with its first model, the file of members that the second one's nodes join by, and both yardsticks."""

    def __init__(self, bench: Bench, members: Path, directories: dict[str, Path]) -> None:
        self.bench = bench
        self._members = members
        self._directories = directories
        self.yardsticks = {name: Yardstick(directory) for name, directory in directories.items()}

    async def start_other(self) -> None:
        """Starts the second model's nodes; the gateway has not heard of them yet."""
        for name in ("far", "decode0"):
            config = self.bench.node(name).config
            named = dataclasses.replace(
                config,
                node_id=f"{OTHER}-{name}",
                model=str(self._directories[OTHER]),
                served_model=OTHER,
                control_port=0,
            )
            await self.bench.system.start_node(named)

    def list_others(self, *names: str) -> None:
        """These nodes are members, and no others."""
        nodes = [{"id": name, "agent": self.bench.node(name).agent_address} for name in names]
        new = self._members.with_suffix(".new")
        new.write_text(json.dumps({"may_be_empty": True, "nodes": nodes}))
        new.replace(self._members)

    async def ask(self, model: str, text: str) -> DemoCompletion:
        body = {"model": model, "prompt": text, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
        return await complete(self.bench.session, self.bench.system.api_url, body, self.bench.name())

    async def status(self, model: str) -> int:
        try:
            await self.ask(model, "hello")
        except RequestFailed as failed:
            return failed.status
        return 200

    async def models(self) -> list[str]:
        async with self.bench.session.get(f"{self.bench.system.api_url}/v1/models") as answer:
            return [card["id"] for card in (await answer.json())["data"]]

    async def until_status(self, model: str, status: int) -> None:
        async def is_so() -> bool:
            return await self.status(model) == status

        await self.bench.wait_until(is_so, 60.0)


@pytest.fixture(scope="module")
def two(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoModels]:
    folder = tmp_path_factory.mktemp("models")
    build_model("llama", folder / OTHER, seed=7, report=lambda line: None)
    with_other_vocabulary(folder / OTHER)
    members = folder / "members.json"
    members.write_text(json.dumps({"may_be_empty": True, "nodes": []}))
    first = models("kimi_linear")
    with Bench(_document(first, folder, members), first, folder / "run") as bench:
        if bench.certificates is not None:
            pytest.skip("nodes that join have no certificates")
        yield TwoModels(bench, members, {"tiny": first, OTHER: folder / OTHER})


@pytest.fixture(scope="module")
def bench(two: TwoModels) -> Bench:
    return two.bench


def _document(model: Path, folder: Path, members: Path) -> dict[str, Any]:
    return {
        "model": {"path": str(model), "name": "tiny"},
        "gateway": {
            "port": 0,
            "threshold_tokens": 100,
            "models_dir": str(folder),
            "model_grace_s": GRACE_S,
            "membership": {"file": str(members)},
            "routing": {"prefill_tokens_per_s": 1000.0, "increment_tokens": 0, "fetch_bytes_per_s": 0.0},
        },
        "node": {"lease_s": 30.0},
        "clusters": [
            {"name": "east", "kind": "prfaas", "nodes": [{"node_id": "far", "role": "prefill", "transport": "tcp"}]},
            {"name": "west", "kind": "pd", "nodes": [{"node_id": "decode0", "role": "decode"}]},
        ],
    }


def untied(two: TwoModels, number: int, words: int) -> list[tuple[str, dict[str, list[int]]]]:
    """So many texts, and what either model says to each."""
    found: list[tuple[str, dict[str, list[int]]]] = []
    for seed in range(UNTIED_TRIES):
        text = text_of(1000 * words + seed, words)
        said = {name: yardstick.said(text) for name, yardstick in two.yardsticks.items()}
        if None not in said.values():
            found.append((text, {name: tokens for name, tokens in said.items() if tokens is not None}))
        if len(found) == number:
            return found
    raise AssertionError(f"of {UNTIED_TRIES} texts of {words} words only {len(found)} have no ties")


def test_a_second_model_joins_serves_beside_the_first_and_leaves(two: TwoModels) -> None:
    texts = untied(two, 3, 40) + untied(two, 2, 6)
    assert two.yardsticks["tiny"].encoded("candle") != two.yardsticks[OTHER].encoded("candle")

    async def answered(model: str, text: str, expected: list[int]) -> str:
        done = await two.ask(model, text)
        assert done.token_ids == expected, (model, text)
        return done.request_id

    async def all_of(model: str) -> None:
        for text, said in texts:
            await answered(model, text, said[model])

    async def scenario() -> None:
        await two.start_other()
        assert await two.models() == ["tiny"]
        assert (await two.status(OTHER), await two.status("tiny")) == (404, 200)

        two.list_others(f"{OTHER}-far", f"{OTHER}-decode0")
        await two.until_status(OTHER, 200)
        assert await two.models() == ["tiny", OTHER]
        mixed = [answered(model, text, said[model]) for text, said in texts for model in two.yardsticks]
        records = [await two.bench.record(name) for name in await asyncio.gather(*mixed)]
        assert {each["status"] for each in records} == {200}
        nodes = {(each["model"], each["decode_node"]) for each in records}
        assert nodes == {("tiny", "decode0"), (OTHER, f"{OTHER}-decode0")}
        far = {(each["model"], each["prefill_node"]) for each in records if each["route"] == "remote"}
        assert far == {("tiny", "far"), (OTHER, f"{OTHER}-far")}

        going_on = asyncio.create_task(all_of("tiny"))
        await two.bench.kill(f"{OTHER}-decode0")
        await two.until_status(OTHER, 503)
        await going_on
        await two.bench.start_again(f"{OTHER}-decode0")
        await two.until_status(OTHER, 200)

        two.list_others()
        await two.until_status(OTHER, 503)
        await two.until_status(OTHER, 404)
        assert await two.models() == ["tiny"]
        await all_of("tiny")

        two.list_others(f"{OTHER}-far", f"{OTHER}-decode0")
        await two.until_status(OTHER, 200)
        await all_of(OTHER)

    two.bench.run(scenario())

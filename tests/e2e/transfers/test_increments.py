"""A conversation that began in another datacenter comes home: its decode node computes what each turn adds. Tokens stay equal."""

from collections.abc import Iterator

import pytest

from tests.conftest import Models
from tests.e2e.harness import Bench, topology_document

pytestmark = pytest.mark.e2e

TURNS = 6
NEW_TOKENS = 60
BLOCK = 64


@pytest.fixture(scope="module")
def bench(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    model = models("kimi_linear")
    document = topology_document(model, threshold=300, chunk_tokens=128)
    for key in ("increment_tokens", "fetch_bytes_per_s"):
        document["gateway"]["routing"].pop(key, None)  # as they are by default
    with Bench(document, model, tmp_path_factory.mktemp("increments")) as running:
        yield running


def test_later_turns_are_computed_at_home(bench: Bench) -> None:
    async def scenario() -> None:
        talk, places = bench.prompt(700, seed=31), []
        for turn in range(TURNS):
            name = bench.name()
            done = await bench.generate(talk, 40, name=name)
            record = await bench.record(name)
            assert done.token_ids == bench.expected(talk, 40)
            assert (record["fallbacks"], record["decode_node"]) == ([], "decode0")
            places.append((record["route"], record["reason"], record["bytes"] > 0))
            talk = [*talk, *done.token_ids]
            await bench.wait_until_heard("decode0", talk, (len(talk) - 1) // BLOCK * BLOCK)
            await bench.wait_idle()
            talk += bench.prompt(NEW_TOKENS, seed=100 + turn)
        assert places[0] == ("remote", "long", True)
        assert places[1:] == [("local", "held", False)] * (TURNS - 1)

    bench.run(scenario())


def test_what_is_held_by_nobody_travels_as_before(bench: Bench) -> None:
    async def scenario() -> None:
        for num_tokens, route in ((200, "local"), (901, "remote")):
            prompt, name = bench.prompt(num_tokens, seed=num_tokens + 5), bench.name()
            await bench.until_link_takes(num_tokens)
            done = await bench.generate(prompt, name=name)
            record = await bench.record(name)
            assert done.token_ids == bench.expected(prompt)
            assert (record["route"], record["bytes"] > 0) == (route, True)

    bench.run(scenario())

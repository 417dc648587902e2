"""A prefix that only the other cluster has is sent where the prefill runs, in both directions; the tokens stay the same."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import Models
from tests.e2e.harness import Bench, topology_document

pytestmark = pytest.mark.e2e

PREFIX, CACHED = 513, 512
ATTEMPTS = 5
TIMEOUT_S = 280.0


@pytest.fixture(scope="module")
def bench(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    model = models("kimi_linear")
    document = topology_document(model, threshold=300, chunk_tokens=128)
    document["gateway"]["routing"] |= {"cross_cluster_cache": True, "link_bytes_per_s": 1e9, "move_timeout_s": 60.0}
    with Bench(document, model, tmp_path_factory.mktemp("moves")) as running:
        yield running


async def served(bench: Bench, prompt: list[int]) -> dict[str, Any]:
    """The record of a request for `prompt`, whose tokens were right."""
    name = bench.name()
    done = await bench.generate(prompt, name=name)
    record = await bench.record(name)
    assert done.token_ids == bench.expected(prompt)
    assert done.cached_tokens == record["cached"]
    assert record["fallbacks"] in ([], ["fetch_late"])  # computing is quick here: a slow move is not waited for
    return record


async def moved(bench: Bench, source: str, num_tokens: int, first_seed: int) -> tuple[list[int], dict[str, Any]]:
    """A prompt whose prefix only `source` had cached, and its record.

    While what was sent before still shows in the reports of a link, there is no room to spare and prefixes stay; or computing
    would have been done before the move: then once more, with other tokens.
    """
    for seed in range(first_seed, first_seed + ATTEMPTS):
        prompt = bench.prompt(num_tokens, seed=seed)
        await bench.prime(source, prompt[:PREFIX])
        record = await served(bench, prompt)
        if record["fetched_from"]:
            return prompt, record
    raise AssertionError(f"never moved: {record}")


def test_to_the_home_cluster(bench: Bench) -> None:
    async def scenario() -> None:
        prompt, record = await moved(bench, "far", 600, 100)
        assert (record["route"], record["prefill_node"], record["fetched_from"]) == ("local", "near", "far")
        assert record["cached"] == CACHED
        # It is there now.
        await bench.wait_until_heard("near", prompt, CACHED)
        record = await served(bench, [*prompt[:PREFIX], 7, 8, 9])
        assert (record["prefill_node"], record["fetched_from"], record["cached"]) == ("near", "", CACHED)

    bench.run(scenario(), TIMEOUT_S)


def test_to_the_prefill_cluster(bench: Bench) -> None:
    async def scenario() -> None:
        _, record = await moved(bench, "near", 900, 200)
        assert (record["route"], record["prefill_node"], record["fetched_from"]) == ("remote", "far", "near")
        assert record["cached"] == CACHED

    bench.run(scenario(), TIMEOUT_S)

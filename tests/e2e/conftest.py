from collections.abc import Iterator

import pytest

from tests.conftest import Models
from tests.e2e.harness import Bench, topology_document


@pytest.fixture(scope="package")
def bench(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One PrfaaS node, one PD prefill node, two decode nodes, a gateway with t = 300 tokens."""
    model = models("kimi_linear")
    document = topology_document(model, threshold=300, decode_nodes=2, chunk_tokens=128, connections=3)
    with Bench(document, model, tmp_path_factory.mktemp("e2e")) as running:
        yield running


@pytest.fixture(autouse=True)
def _nothing_is_left(bench: Bench) -> Iterator[None]:
    yield
    bench.run(bench.wait_idle())

"""What needs an Envoy is skipped without one."""

import pytest

from tests.epp.world import ENVOY


@pytest.fixture(autouse=True)
def _envoy(request: pytest.FixtureRequest) -> None:
    if request.path.name in ("test_behind_envoy.py", "test_nodes.py") and not ENVOY.is_file():
        pytest.skip(f"no Envoy at {ENVOY}: run `make test-epp`, which fetches one, or set ENVOY_BINARY")

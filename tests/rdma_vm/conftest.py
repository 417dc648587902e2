"""These tests cut links: they run in the guest of `make test-rdma` and nowhere else."""

import os
from collections.abc import Iterator

import pytest

from tests.rdma_vm.links import mend_all

NEEDS_GUEST = pytest.mark.skipif(os.environ.get("RDMA_VM") != "1", reason="needs the guest of `make test-rdma`")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("rdma") is not None:  # folders are keywords, too
            item.add_marker(NEEDS_GUEST)


@pytest.fixture(autouse=True)
def whole_links() -> Iterator[None]:
    yield
    if os.environ.get("RDMA_VM") == "1":
        mend_all()

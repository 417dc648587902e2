"""The etcd that gateways of a fleet share, a double and a real one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.membership.etcd.servers import DoubledEtcd, EtcdUnderTest, RealEtcd, needed_binary


@pytest.fixture(params=["double", pytest.param("real", marks=pytest.mark.long)])
def etcd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EtcdUnderTest]:
    server: EtcdUnderTest = DoubledEtcd() if request.param == "double" else RealEtcd(tmp_path, needed_binary())
    try:
        server.start()
        yield server
    finally:
        server.close()

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.vllm.worker_side.listener import Scheduler


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[Scheduler]:
    scheduler = Scheduler(tmp_path)
    yield scheduler
    scheduler.close()

import pytest

from tests.engine.vllm.scripted import World


@pytest.fixture
def world() -> World:
    return World()

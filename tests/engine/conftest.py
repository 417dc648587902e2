from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from engine.torch.embedded import EmbeddedEngine
from engine.torch.tiny import build_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of a tiny model of an architecture, built once."""
    root = tmp_path_factory.mktemp("models")

    @cache
    def build(arch: str) -> Path:
        return build_model(arch, root / arch, report=lambda _: None).path

    return build


@pytest.fixture(scope="session")
def engine_of(model_dir: Callable[[str], Path]) -> Callable[[str], Any]:
    """An engine of an architecture, loaded once. Sequences are independent, so tests may share it."""

    @cache
    def load(arch: str) -> EmbeddedEngine:
        return EmbeddedEngine.load_directory(model_dir(arch), block_size=64)

    return load

"""Metrics of a node are for who shows the key whose digest its file has."""

from hashlib import sha256
from pathlib import Path

import pytest
from aiohttp import web

from node.metrics import MetricsKey


def digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def shown(key: str, scheme: str = "Bearer") -> dict[str, str]:
    return {"Authorization": f"{scheme} {key}"}


def test_who_shows_the_key_sees_metrics_and_keys_are_taken_up_at_once(tmp_path: Path) -> None:
    file = tmp_path / "metrics.sha256"
    file.write_text(f"{digest('one')}\n{digest('two')}\n")
    key = MetricsKey(str(file))
    for good in (shown("one"), shown("two", "bearer")):
        assert key.check(good)
    file.write_text(digest("two"))
    for wrong in ({}, shown("one"), shown("two", "Basic"), shown(digest("two")), shown(""), shown("\udcff")):
        with pytest.raises(web.HTTPUnauthorized):
            key.check(wrong)


def test_a_file_that_is_gone_lets_nobody_in(tmp_path: Path) -> None:
    with pytest.raises(web.HTTPUnauthorized):
        MetricsKey(str(tmp_path / "gone")).check(shown("one"))


def test_without_a_file_everybody_sees_metrics_and_has_shown_nothing() -> None:
    assert not MetricsKey("").check(shown("one"))

from pathlib import Path

import pytest

from tests.spreading import modules_below, share_of


@pytest.mark.parametrize(("items", "workers"), [(10, 3), (2, 3), (0, 1), (7, 1), (9, 3)])
def test_shares_are_all_items_in_their_order(items: int, workers: int) -> None:
    shares = [share_of(range(items), worker, workers) for worker in range(workers)]
    assert [item for share in shares for item in share] == list(range(items))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_modules_of_ignored_folders_are_left_out(tmp_path: Path) -> None:
    for name in ("test_b.py", "a/test_a.py", "a/worlds.py", "slow/test_c.py"):
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / name).touch()
    found = modules_below(tmp_path / "tests", tmp_path, [tmp_path / "tests" / "slow"])
    assert found == ["tests.a.test_a", "tests.test_b"]

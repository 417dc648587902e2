import pytest

from engine.sglang.version import is_tested, untested


@pytest.mark.parametrize(("version", "tested"), [
    ("0.5.23", True), ("0.5.23.post1", True), ("0.5.23+cpu", True), ("0.5.24", False), ("0.5.230", False), ("0.5.2", False),
])  # fmt: skip
def test_tested_versions(version, tested):
    assert is_tested(version) is tested


def test_a_version_that_is_not_tested_is_named():
    assert "0.6.0" in untested("0.6.0")

"""Certificates by clusters' own authorities: which one signs, what a new cluster brings, and what none may sign."""

from pathlib import Path

import pytest

from prfaas.errors import CertificateError
from prfaas.system.certificates import holder, issue, issue_and_tell, paths


def test_a_new_cluster_gets_an_authority_and_a_line(tmp_path: Path) -> None:
    said: list[str] = []
    first, south = [holder("home/node/d0=10.0.0.2"), holder("gateway")], [holder("south/prefill/p0")]
    issue_and_tell(tmp_path, first, 30, said.append, by_cluster=True)
    assert any("authorities is new or has a new line" in line for line in said)
    said.clear()
    issue_and_tell(tmp_path, [holder("home/node/d1")], 30, said.append)  # the list is there, and says who signs
    assert not any("new line" in line for line in said)
    issue_and_tell(tmp_path, south, 30, said.append)
    assert any("authorities is new or has a new line" in line for line in said)
    lines = (tmp_path / "authorities").read_text().splitlines()[1:]
    assert lines == [
        "home/authority.pem home/node",
        "any/authority.pem any/gateway",
        "south/authority.pem south/prefill",
    ]
    assert paths(tmp_path, "d0")["authority"] == str(tmp_path / "authorities")


def test_a_list_is_replaced_and_never_half_written(tmp_path: Path) -> None:
    issue(tmp_path, [holder("home/node/d0")], 30, by_cluster=True)
    before = (tmp_path / "authorities").open()
    issue(tmp_path, [holder("south/prefill/p0")], 30)
    assert "south" not in before.read()
    before.close()
    assert "south" in (tmp_path / "authorities").read_text()
    assert (tmp_path / "authorities").stat().st_mode & 0o022 == 0


def test_an_authority_signs_for_what_its_line_says_where_its_key_is(tmp_path: Path) -> None:
    issue(tmp_path, [holder("home/node/d0"), holder("remote/prefill/p0")], 30, by_cluster=True)
    with pytest.raises(CertificateError, match="no authority signs for home/gateway: write that into its line first"):
        issue(tmp_path, [holder("home/gateway/g")], 30)
    before = (tmp_path / "remote" / "authority.pem").read_bytes()
    (tmp_path / "remote" / "authority.key").unlink()
    with pytest.raises(CertificateError, match=r"remote/authority\.key is not here: spiffe://prfaas/remote/prefill/p1"):
        issue(tmp_path, [holder("remote/prefill/p1")], 30)
    assert (tmp_path / "remote" / "authority.pem").read_bytes() == before
    assert not (tmp_path / "p1.pem").exists()

from pathlib import Path

import pytest

from transport.control.proto.generate import ROOT, generate


def test_generated_code_is_current(tmp_path: Path) -> None:
    generate(tmp_path)
    for made in (tmp_path / "transport" / "control" / "proto").iterdir():
        shipped = ROOT / "transport" / "control" / "proto" / made.name
        if made.read_text() != shipped.read_text():
            pytest.fail(f"{shipped} is not what node.proto says: run `make proto`")

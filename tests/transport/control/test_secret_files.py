"""Secrets lie in files, among systemd's credentials, or in the environment."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from transport.control.secret_files import located, read_secret
from transport.control.settings import SettingsError, build

GIVEN = {"CREDENTIALS_DIRECTORY": "/run/credentials/gateway.service", "TOKEN": "secret\n"}


def test_a_path_is_relative_to_its_settings_file_or_to_systemds_credentials() -> None:
    base = Path("/etc/prfaas")
    assert located(base, "plan.token", GIVEN) == base / "plan.token"
    assert located(base, "/abs", GIVEN) == Path("/abs")
    found = located(base, "$CREDENTIALS_DIRECTORY/plan.token", GIVEN)
    assert found == Path("/run/credentials/gateway.service/plan.token")
    with pytest.raises(ValueError, match="CREDENTIALS_DIRECTORY is not set: systemd sets it"):
        located(base, "$CREDENTIALS_DIRECTORY/plan.token", {})


def test_a_secret_is_read_from_a_file_or_a_variable(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hidden\n")
    assert read_secret(tmp_path / "token", {}) == "hidden"
    assert read_secret(located(tmp_path, "env:TOKEN", GIVEN), GIVEN) == "secret"
    for gone in ("env:OTHER", "other"):
        with pytest.raises(OSError, match=r"OTHER|other"):
            read_secret(tmp_path / gone, GIVEN)


@dataclass
class CredentialsTable:
    token_file: Path


def test_a_settings_file_names_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"token_file": "$CREDENTIALS_DIRECTORY/token"}
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", "/run/c")
    assert build(CredentialsTable, wanted, "[x]").token_file == Path("/run/c/token")
    monkeypatch.delenv("CREDENTIALS_DIRECTORY")
    with pytest.raises(SettingsError, match=r"\[x\]: token_file = .*systemd sets it"):
        build(CredentialsTable, wanted, "[x]")

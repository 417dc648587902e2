"""What `prfaas key` prints is what a gateway's file takes."""

import argparse
import tomllib
from datetime import UTC, date, datetime

import pytest

from gateway.auth.keyring import Keyring, digest_of
from gateway.config.gateway import GatewayConfig
from gateway.config.operators import OperatorRole
from gateway.config.tenants import TenantConfig
from prfaas.cli import main
from prfaas.commands.argument_types import day_after
from prfaas.commands.keys import PREFIX, make_and_tell, new_key
from prfaas.errors import KeyNameError
from transport.control.settings import build


def told(name: str) -> tuple[str, dict[str, object]]:
    """The key, and the tables to write."""
    said: list[str] = []
    make_and_tell(name, said.append)
    (text,) = said  # at once: `head -1` closes the pipe after a line
    key, _, rest = text.partition("\n")
    assert "`prfaas reload`" in rest
    return key, tomllib.loads(rest)["gateway"]


def test_a_tenants_key_opens_what_is_its_own() -> None:
    key, tables = told("acme.1")
    keys = tables["tenants"]["acme.1"]["keys"]  # type: ignore[index]
    assert Keyring({"acme.1": TenantConfig(keys=tuple(keys))}, ()).tenant({"x-api-key": key}).name == "acme.1"
    assert key not in str(tables)


def test_an_operators_key_is_an_operators() -> None:
    key, tables = told("operator")
    assert tables == {"operators": [{"name": "operator", "role": "admin", "keys": [digest_of(key)]}]}


def test_an_operator_has_a_name_a_role_and_an_end() -> None:
    said: list[str] = []
    make_and_tell("ann", said.append, OperatorRole.VIEWER, date(2027, 1, 31))
    key, _, rest = said[0].partition("\n")
    nodes = [{"agent": "127.0.0.1:7001"}]
    table = {"tokenizer_dir": "t", "nodes": nodes, **tomllib.loads(rest)["gateway"]}
    (ann,) = build(GatewayConfig, table, "[gateway]").operators
    assert (ann.name, ann.keys, ann.role) == ("ann", (digest_of(key),), OperatorRole.VIEWER)
    assert ann.expires == datetime(2027, 1, 31, tzinfo=UTC)


def test_no_two_keys_are_equal_and_all_can_be_told_from_words() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith(PREFIX) and len(key) > 50 for key in keys)


@pytest.mark.parametrize("name", ["", "a b", "a/b", "x" * 65])
def test_who_has_no_name_gets_no_key(name: str) -> None:
    with pytest.raises(KeyNameError):
        make_and_tell(name, print)


@pytest.mark.parametrize("text", ["2026-11-25", "2026-11-26"])
def test_a_key_that_would_be_refused_at_once_is_not_made(text: str) -> None:
    later = day_after(date(2026, 11, 26))
    with pytest.raises(argparse.ArgumentTypeError, match=r"must be a day after today, 2026-11-26"):
        later(text)
    assert later("2026-11-27") == date(2026, 11, 27)


def test_the_command_refuses_a_day_in_the_past(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["key", "acme", "--expires", "2020-01-01"])
    told = capsys.readouterr()
    assert "--expires: '2020-01-01': must be a day after today" in told.err
    assert not told.out

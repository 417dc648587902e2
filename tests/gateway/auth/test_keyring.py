"""Whose a key is, which keys open operators' pages, and what a file may say of both."""

import base64
from typing import Any

import pytest

from gateway.auth.keyring import EVERYBODY, Keyring, digest_of
from gateway.config.gateway import GatewayConfig
from gateway.config.operators import nameless
from gateway.config.tenants import TenantConfig
from gateway.errors import BadRequest, Unauthorised
from transport.control.settings import SettingsError, build

ACME, RIVAL, OPERATOR = "sk-acme", "sk-rival", "sk-operator"
TENANTS = {
    "acme": TenantConfig(keys=(digest_of(ACME), digest_of("sk-acme-old"))),
    "rival": TenantConfig(keys=(digest_of(RIVAL),), group="friends"),
}


def config_of(**values: Any) -> GatewayConfig:
    nodes = [{"agent": "127.0.0.1:7001"}]
    return build(GatewayConfig, {"tokenizer_dir": "tok", "nodes": nodes, **values}, "[gateway]")


def shown(key: str, scheme: str = "Bearer") -> dict[str, str]:
    return {"Authorization": f"{scheme} {key}"}


def basic(user: str, key: str) -> dict[str, str]:
    return shown(base64.b64encode(f"{user}:{key}".encode()).decode(), "Basic")


def test_a_key_is_that_of_its_tenant_however_it_is_shown() -> None:
    keyring = Keyring(TENANTS, ())
    for headers in (shown(ACME), shown(ACME, "bearer"), shown("sk-acme-old"), {"x-api-key": ACME}):
        assert keyring.tenant(headers).name == "acme"
    acme, rival = keyring.tenant(shown(ACME)), keyring.tenant(shown(RIVAL))
    assert (acme.group, rival.group) == ("acme", "friends")
    assert acme.memory != rival.memory


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, "missing_api_key"),
        (shown(""), "missing_api_key"),
        (basic("acme", ACME), "missing_api_key"),
        (shown("sk-nobody"), "invalid_api_key"),
        (shown(digest_of(ACME)), "invalid_api_key"),  # what the file has opens nothing
        (shown("\udcff"), "invalid_api_key"),
    ],
)
def test_without_a_key_of_somebody_nobody_is_served(headers: dict[str, str], code: str) -> None:
    with pytest.raises(Unauthorised) as refusal:
        Keyring(TENANTS, ()).tenant(headers)
    assert (refusal.value.status, refusal.value.code) == (401, code)
    assert "sk-" not in refusal.value.message


def test_without_tenants_everybody_is_served_and_remembered_by_key() -> None:
    keyring = Keyring({}, ())
    assert keyring.tenant({}) is EVERYBODY
    mine, theirs = keyring.tenant(shown("a")), keyring.tenant(shown("b"))
    assert (mine.name, mine.group) == ("", "")
    assert mine.memory != theirs.memory


@pytest.mark.parametrize(
    ("tenants", "operator_keys", "headers", "may"),
    [
        ({}, (), {}, True),
        ({}, (digest_of(OPERATOR),), {}, False),
        ({}, (digest_of(OPERATOR),), shown(OPERATOR), True),
        ({}, (digest_of(OPERATOR),), basic("anybody", OPERATOR), True),
        ({}, (digest_of(OPERATOR),), shown("%%%", "Basic"), False),
        (TENANTS, (), {}, False),
        (TENANTS, (), shown(ACME), False),
        (TENANTS, (digest_of(OPERATOR),), shown(ACME), False),
        (TENANTS, (digest_of(OPERATOR),), shown(OPERATOR), True),
    ],
)
def test_operators_pages_are_for_operators(
    tenants: dict[str, TenantConfig], operator_keys: tuple[str, ...], headers: dict[str, str], may: bool
) -> None:
    keyring = Keyring(tenants, nameless(operator_keys))
    if may:
        keyring.check_operator(headers)
        return
    with pytest.raises(Unauthorised):
        keyring.check_operator(headers)


def test_keys_change_while_it_runs() -> None:
    keyring = Keyring({}, ())
    keyring.configure(TENANTS, nameless((digest_of(OPERATOR),)))
    with pytest.raises(Unauthorised):
        keyring.tenant({})
    keyring.configure({"rival": TENANTS["rival"]}, ())
    with pytest.raises(Unauthorised):
        keyring.tenant(shown(ACME))


def test_an_operator_names_a_tenant() -> None:
    keyring = Keyring(TENANTS, ())
    assert keyring.named("rival").group == "friends"
    assert keyring.named("") is EVERYBODY
    with pytest.raises(BadRequest, match="no tenant 'nobody'"):
        keyring.named("nobody")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tenants": {"a": {"keys": [ACME]}}}, "keys.*SHA-256"),
        ({"tenants": {"a": {"keys": []}}}, "keys.*at least one"),
        ({"tenants": {"a b": {"keys": [digest_of(ACME)]}}}, "tenants.*'a b'.*a name of letters"),
        ({"tenants": {"a": {"keys": [digest_of(ACME)], "group": "x/y"}}}, "group.*'x/y'"),
        ({"tenants": {name: {"keys": [digest_of(ACME)]} for name in "ab"}}, "each key with one tenant"),
        (
            {"tenants": {"a": {"keys": [digest_of(ACME)], "classes": ["vip"]}}},
            "tenants.a.classes.*'vip'.*some of default",
        ),
        ({"operator_keys": [OPERATOR]}, "operator_keys.*SHA-256"),
        ({"host": "0.0.0.0"}, "host = '0.0.0.0': other machines reach it.*prfaas key.*open = true"),
        ({"host": "10.0.0.1"}, "other machines reach it without a key"),
    ],
)
def test_files_that_say_it_wrong_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message) as refusal:
        config_of(**values)
    assert ACME not in str(refusal.value)
    assert OPERATOR not in str(refusal.value)


@pytest.mark.parametrize(
    "values",
    [
        {"host": "0.0.0.0", "open": True},
        {"host": "0.0.0.0", "tenants": {"a": {"keys": [digest_of(ACME)]}}},
        {"host": "localhost"},
        {"host": "::1"},
    ],
)
def test_who_listens_further_says_so_or_has_keys(values: dict[str, Any]) -> None:
    assert isinstance(config_of(**values), GatewayConfig)

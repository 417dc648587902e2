"""Operators by tokens of an identity provider: which role a group gives, and that no token is a tenant's and an operator's."""

import json
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.auth.keyring import Keyring, KeyStanding, digest_of
from gateway.auth.oidc import TokenRefused, TokenVerifier
from gateway.auth.operator import Operator
from gateway.auth.sessions import COOKIE, LocalSessions, OperatorSessions, SharedSessions
from gateway.config.gateway import GatewayConfig
from gateway.config.oidc import OidcConfig, OidcOperators
from gateway.config.operators import OperatorConfig, OperatorRole
from gateway.errors import ApiError, Forbidden, Unauthorised, Unavailable
from tests.gateway.auth.test_oidc import ISSUER, KEYS, OTHER_KEY, TENANTS, basic, bearer, token
from tests.gateway.memory.pipeline import Pipelined, on_memory_loop, pipeline
from transport.control.settings import SettingsError, build

OPERATORS = OidcOperators(audience="prfaas-operators", viewer=("readers",), operator=("oncall",), admin=("owners",))
CONFIG = OidcConfig(issuer=ISSUER, audience="prfaas", operators=OPERATORS)
NOW = time.time()  # noqa: TID251
EAST_WEST = {"source": "east", "destination": "west", "drained": True}


def person(**claims: Any) -> str:
    return token(**{"aud": "prfaas-operators", "azp": None, "sub": "ann-17", "groups": ["oncall"], **claims})


def verifier(config: OidcConfig = CONFIG) -> TokenVerifier:
    tokens = TokenVerifier(config)
    tokens.take_keys(KEYS)
    return tokens


def ring(config: OidcConfig = CONFIG, **others: Any) -> Keyring:
    return Keyring(TENANTS, (), verifier(config), lambda: NOW, **others)


@pytest.mark.parametrize(
    ("groups", "role"),
    [
        ("readers", OperatorRole.VIEWER),
        (["others", "oncall"], OperatorRole.OPERATOR),
        (["readers", "owners", "oncall"], OperatorRole.ADMIN),
        ([7, "readers", None], OperatorRole.VIEWER),
    ],
)
def test_a_group_gives_a_role_and_several_the_highest(groups: Any, role: OperatorRole) -> None:
    found = ring().check_operator(bearer(person(groups=groups)))
    assert (found.name, found.role, found.issuer) == ("ann-17", role, ISSUER)
    assert ring().check_operator(basic(person(groups=groups))).role is role  # as a browser's password


def test_a_role_that_is_too_small_is_forbidden_and_names_the_person() -> None:
    with pytest.raises(Forbidden, match="ann-17 has operator"):
        ring().check_operator(bearer(person()), OperatorRole.ADMIN)


def test_another_claim_may_give_the_role_and_another_the_name() -> None:
    operators = OidcOperators(audience="prfaas-operators", claim="roles", name_claim="email", admin=("root",))
    held = person(groups=None, roles="root", email="ann@example.com")
    found = ring(replace(CONFIG, operators=operators)).check_operator(bearer(held))
    assert (found.name, found.role) == ("ann@example.com", OperatorRole.ADMIN)


REFUSED = [
    (person(aud="another"), "invalid_token"),
    (person(aud=["prfaas", "prfaas-operators"]), "invalid_token"),  # a tenant's and an operator's
    (person(aud=["prfaas", "prfaas-operators"], azp="acme"), "invalid_token"),
    (person(exp=1), "invalid_token"),
    (person(iss="https://login.example.org"), "invalid_token"),
    (person(sub=None), "invalid_token"),
    (person(sub="x" * 257), "invalid_token"),
    (person(sub="ann\ndone: reload by bob"), "invalid_token"),
    (person(sub=" "), "invalid_token"),
    (person(sub="ann-17 "), "invalid_token"),
    (person(exp=10**400), "invalid_token"),
    (person(exp=float("inf")), "invalid_token"),
    (person(exp=[1]), "invalid_token"),
    (person(nbf=[1]), "invalid_token"),
    (person(aud=[["prfaas-operators"]]), "invalid_token"),
    (person(aud={"prfaas-operators": True}), "invalid_token"),
    (person(groups=7), "unknown_operator"),
    (person(groups=[["owners"]]), "unknown_operator"),
    (person(groups=None), "unknown_operator"),
    (person(groups=[]), "unknown_operator"),
    (person(groups=["strangers"]), "unknown_operator"),
    (person(groups="oncall owners"), "unknown_operator"),
    (person(groups={"owners": True}), "unknown_operator"),
    (token(OTHER_KEY, aud="prfaas-operators", groups=["owners"], sub="ann-17"), "invalid_token"),
]


@pytest.mark.parametrize(("held", "code"), REFUSED)
def test_what_does_not_hold_makes_no_operator_and_no_tenant(held: str, code: str) -> None:
    keyring = ring()
    for ask in (keyring.check_operator, keyring.tenant):
        with pytest.raises(TokenRefused) as refusal:
            ask(bearer(held))
        assert (refusal.value.status, refusal.value.code) == (401, code)
        assert held not in refusal.value.message
    assert keyring.token_refusal(bearer(held))
    assert keyring.standing(bearer(held)) is KeyStanding.PAST  # which is no guess
    assert not keyring.is_operator(bearer(held))


def test_no_token_is_a_tenants_and_an_operators() -> None:
    keyring = ring()
    tenants, operators = bearer(token(groups=["owners"], sub="ann-17")), bearer(person(azp="acme", groups=["owners"]))
    assert keyring.tenant(tenants).name == "acme"
    with pytest.raises(Unauthorised, match="for operators"):
        keyring.check_operator(tenants)
    assert keyring.check_operator(operators).name == "ann-17"
    with pytest.raises(Unauthorised, match="names no tenant"):
        keyring.tenant(operators)
    for held in (tenants, operators):
        assert keyring.standing(held) is KeyStanding.RIGHT
        assert keyring.token_refusal(held) == ""


def test_tenants_may_have_keys_alone_and_operators_tokens_alone() -> None:
    keyring = ring(replace(CONFIG, audience=""))
    assert keyring.check_operator(bearer(person())).name == "ann-17"
    assert keyring.tenant(bearer("sk-rival")).name == "rival"
    for aud in ("prfaas", "", [""]):
        with pytest.raises(Unauthorised):
            keyring.tenant(bearer(token(aud=aud)))
    assert ring(replace(CONFIG, audience="")).check_operator(bearer(person(aud=["", "prfaas-operators"])))


def test_with_operators_by_token_alone_their_pages_are_closed() -> None:
    keyring = Keyring({}, (), verifier(), lambda: NOW)
    assert keyring.has_operators
    for headers in ({}, bearer("sk-any"), bearer(token())):
        with pytest.raises(Unauthorised):
            keyring.check_operator(headers)
    assert keyring.check_operator(bearer(person())).name == "ann-17"


def test_a_gateway_whose_file_names_no_operators_takes_no_tokens_of_theirs() -> None:
    with pytest.raises(Unauthorised):
        ring(replace(CONFIG, operators=None)).check_operator(bearer(person(aud="prfaas", azp="acme")))


def test_before_the_providers_keys_are_known_a_token_waits_and_a_key_does_not() -> None:
    ann = OperatorConfig(name="ann", keys=(digest_of("sk-ann"),))
    keyring = Keyring({}, (ann,), TokenVerifier(CONFIG), lambda: NOW)
    assert keyring.check_operator(bearer("sk-ann")).name == "ann"
    with pytest.raises(Unavailable):
        keyring.check_operator(bearer(person()))
    assert not keyring.is_operator(bearer(person()))
    assert keyring.token_refusal(bearer(person())) == ""


@pytest.mark.parametrize("shared", [False, True])
def test_a_session_from_a_token_is_the_persons_and_ends_with_it(tmp_path: Path, shared: bool) -> None:
    now = [NOW]
    sessions = OperatorSessions(SharedSessions(tmp_path / "sessions") if shared else LocalSessions(), 7200.0)
    held = bearer(person(exp=int(NOW) + 3600))
    first = Keyring({}, (), verifier(), lambda: now[0], sessions)
    cookie = {"Cookie": f"{COOKIE}={sessions.begin('digest', NOW, first.check_operator(held))}"}
    # Of another worker, which has never seen the token.
    assert Keyring({}, (), verifier(), lambda: now[0], sessions).check_operator(cookie).name == "ann-17"
    # Of a gateway that takes no such tokens any more.
    for config in (replace(CONFIG, issuer="https://other.example.com"), replace(CONFIG, operators=None)):
        other = Keyring(TENANTS, (), TokenVerifier(config), lambda: now[0], sessions)
        with pytest.raises(Unauthorised):
            other.check_operator(cookie)
    now[0] += 3601
    assert not first.is_operator(cookie)


@pytest.mark.parametrize(
    "config",
    [
        replace(CONFIG, operators=replace(OPERATORS, operator=("others",))),
        replace(CONFIG, operators=replace(OPERATORS, viewer=("oncall",), operator=("others",))),
        replace(CONFIG, operators=replace(OPERATORS, audience="others")),
        replace(CONFIG, jwks_url="https://other.example.com/keys"),
    ],
)
def test_a_session_ends_with_the_settings_by_which_its_token_was_checked(tmp_path: Path, config: OidcConfig) -> None:
    # A gateway that is replaced keeps its sessions' folder.
    sessions = OperatorSessions(SharedSessions(tmp_path / "sessions"), 7200.0)
    first = ring(sessions=sessions)
    cookie = {"Cookie": f"{COOKIE}={sessions.begin('digest', NOW, first.check_operator(bearer(person())))}"}
    assert ring(replace(CONFIG), sessions=sessions).check_operator(cookie).role is OperatorRole.OPERATOR
    with pytest.raises(Unauthorised):
        ring(config, sessions=sessions).check_operator(cookie)


def test_strangers_tokens_write_no_line_each(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    keyring, junk = ring(), bearer("eyJh.eyJh.eyJh")
    for _ in range(100):
        assert keyring.token_refusal(junk)
    assert not [each for each in caplog.records if each.name == "prfaas.gateway.oidc"]


@pytest.mark.parametrize(
    ("oidc", "message"),
    [
        ({"operators": {"audience": "o", "admin": ["a"]}}, r"oidc\.issuer"),
        ({"issuer": ISSUER, "audience": "o", "operators": {"audience": "o", "admin": ["a"]}}, "another audience"),
        ({"issuer": ISSUER, "operators": {"audience": "", "admin": ["a"]}}, r"oidc\.operators\.audience"),
        ({"issuer": ISSUER, "operators": {"audience": "o", "claim": "", "admin": ["a"]}}, r"oidc\.operators\.claim"),
        ({"issuer": ISSUER, "operators": {"audience": "o", "name_claim": "", "admin": ["a"]}}, "name_claim"),
        ({"issuer": ISSUER, "operators": {"audience": "o"}}, "values of groups"),
        ({"issuer": ISSUER, "operators": {"audience": "o", "admin": [""]}}, "no empty value"),
        (
            {"issuer": ISSUER, "operators": {"audience": "o", "admin": ["a"], "viewer": ["a"]}},
            "each value with one role",
        ),
        ({"issuer": ISSUER, "operators": {"admin": ["a"]}}, "missing: audience"),
        ({"issuer": ISSUER, "operators": {"audience": "o", "root": ["a"]}}, "unknown key 'root'"),
    ],
)
def test_what_a_file_may_not_say_of_operators(oidc: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        build(OidcConfig, oidc, "[gateway.oidc]")


def test_tenants_need_keys_where_tokens_are_operators_alone() -> None:
    oidc = {"issuer": ISSUER, "operators": {"audience": "o", "admin": ["a"]}}
    table = {"tokenizer_dir": "tok", "nodes": [{"agent": "127.0.0.1:7001"}], "oidc": oidc}
    assert build(GatewayConfig, table, "[gateway]").oidc.audiences == ("o",)
    with pytest.raises(SettingsError, match=r"tenants\.acme\.keys"):
        build(GatewayConfig, table | {"tenants": {"acme": {"subjects": ["a"]}}}, "[gateway]")


async def asked(w: Pipelined, method: str, path: str, headers: dict[str, str], body: Any = None) -> tuple[int, str]:
    async with w.http.request(method, path, headers=headers, json=body) as answer:
        return answer.status, await answer.text()


@on_memory_loop
async def test_the_audit_log_names_the_person_and_the_issuer_and_refusals_are_counted_with_their_address() -> None:
    vic = OperatorConfig(name="vic", keys=(digest_of("sk-vic"),))
    async with pipeline(tenants=TENANTS, operators=(vic,), oidc=CONFIG) as w:
        w.door.tokens.take_keys(KEYS)
        drain = ("POST", "/prfaas/links")
        assert (await asked(w, *drain, bearer(person()), EAST_WEST))[0] == 200
        assert (await asked(w, *drain, bearer(person(groups=["readers"])), EAST_WEST))[0] == 403
        assert (await asked(w, *drain, bearer("sk-vic"), EAST_WEST))[0] == 403
        for held, code in REFUSED:
            status, said = await asked(w, *drain, bearer(held), EAST_WEST)
            assert (status, code in said) == (401, True), held
        status, metrics = await asked(w, "GET", "/metrics", bearer(person(groups=["readers"])))
        assert status == 200
        assert f'prfaas_wrong_keys_total{{what="token"}} {len(REFUSED)}.0' in metrics
        assert 'what="wrong"' not in metrics
        log = [
            tuple(each[key] for key in ("operator", "issuer", "action", "address", "outcome", "code"))
            for each in map(
                json.loads, (await asked(w, "GET", "/prfaas/audit?since=0", bearer("sk-vic")))[1].splitlines()
            )
        ]
    assert log == [
        ("ann-17", ISSUER, "drain", "127.0.0.1", "done", ""),
        ("ann-17", ISSUER, "link", "127.0.0.1", "refused", "role_needed"),
    ]


@on_memory_loop
async def test_a_refused_token_is_a_line_with_its_reason_and_holds_no_address_off() -> None:
    async with pipeline(tenants=TENANTS, oidc=CONFIG) as w:
        w.door.tokens.take_keys(KEYS)
        for _ in range(40):
            assert (await asked(w, "GET", "/prfaas/load", bearer(person(aud="another"))))[0] == 401
        assert (await asked(w, "GET", "/prfaas/load", bearer(person())))[0] == 200
        _, lines = await asked(w, "GET", "/prfaas/audit?since=0", bearer(person()))
    assert '"action":"show a token","target":"/prfaas/load","address":"127.0.0.1","outcome":"refused"' in lines
    assert '"code":"InvalidAudienceError"' in lines


@on_memory_loop
async def test_a_browser_logs_in_with_a_token() -> None:
    async with pipeline(tenants=TENANTS, oidc=CONFIG) as w:
        w.door.tokens.take_keys(KEYS)
        async with w.http.post("/prfaas/session", json={}, headers=bearer(person())) as answer:
            assert answer.status == 200
            cookie = {"Cookie": f"{COOKIE}={answer.cookies[COOKIE].value}"}
        assert await asked(w, "GET", "/prfaas/session", cookie) == (200, '{"name":"ann-17","role":"operator"}')
        assert (await asked(w, "POST", "/prfaas/links", cookie, EAST_WEST))[0] == 200
        assert (await asked(w, "POST", "/prfaas/config", cookie, {}))[0] == 403
        async with w.http.post("/prfaas/session", json={}, headers=bearer(token())) as answer:
            assert answer.status == 401  # a tenant's


def test_an_operator_is_named_with_its_issuer() -> None:
    assert str(Operator("ann")) == "ann"
    assert str(Operator("ann", issuer=ISSUER)) == f"ann of {ISSUER}"


def test_a_refusal_is_an_answer_to_the_client() -> None:
    assert isinstance(TokenRefused("no", "invalid_token", "why"), ApiError)

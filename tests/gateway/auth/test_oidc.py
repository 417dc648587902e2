"""Tokens of an identity provider: which hold, which do not, and what becomes of a provider that is gone."""

import asyncio
import hashlib
import hmac
import json
import time
from base64 import b64encode, urlsafe_b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import jwt
import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from gateway.auth.keyring import Keyring, KeyStanding, digest_of
from gateway.auth.oidc import Provider, TokenVerifier, looks_like_a_token
from gateway.config.oidc import OidcConfig
from gateway.config.operators import OperatorConfig
from gateway.config.tenants import TenantConfig
from gateway.errors import ApiError
from tests.gateway.worlds import on_loop, until, world
from transport.control.settings import SettingsError

ISSUER = "https://login.example.com"
CONFIG = OidcConfig(issuer=ISSUER, audience="prfaas")
RSA_KEY = rsa.generate_private_key(65537, 2048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())
OTHER_KEY = rsa.generate_private_key(65537, 2048)
UNSHOWN_KEY = rsa.generate_private_key(65537, 2048)
TENANTS = {"acme": TenantConfig(subjects=("client-7",)), "rival": TenantConfig(keys=(digest_of("sk-rival"),))}


def shown(key: Any, name: str, algorithm: str) -> dict[str, Any]:
    return {**jwt.get_algorithm_by_name(algorithm).to_jwk(key.public_key(), as_dict=True), "kid": name, "use": "sig"}


KEYS = {"keys": [shown(RSA_KEY, "r", "RS256"), shown(EC_KEY, "e", "ES256")]}


def token(key: Any = RSA_KEY, name: str | None = "r", algorithm: str = "RS256", **claims: Any) -> str:
    said = {"iss": ISSUER, "aud": "prfaas", "exp": int(time.time()) + 86_400, "azp": "acme", **claims}  # noqa: TID251
    said = {claim: value for claim, value in said.items() if value is not None}
    return jwt.encode(said, key, algorithm, headers={"kid": name} if name else None)


def signed_with_the_public_key() -> str:
    """The classic forgery: an HMAC whose secret is what everybody can read."""
    public = RSA_KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    _, body, _ = token().split(".")
    head = urlsafe_b64encode(json.dumps({"alg": "HS256", "kid": "r"}).encode()).decode().rstrip("=")
    mac = hmac.new(public, f"{head}.{body}".encode(), hashlib.sha256).digest()
    return f"{head}.{body}.{urlsafe_b64encode(mac).decode().rstrip('=')}"


def tokens(keys: dict[str, Any] = KEYS) -> TokenVerifier:
    checked = TokenVerifier(CONFIG)
    checked.take_keys(keys)
    return checked


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_token_names_a_tenant_by_name_or_subject() -> None:
    keyring = Keyring(TENANTS, (), tokens())
    for held in (token(), token(azp="client-7"), token(EC_KEY, "e", "ES256"), token(aud=["other", "prfaas"])):
        assert keyring.tenant(bearer(held)).name == "acme"
    assert keyring.tenant(bearer("sk-rival")).name == "rival"


@pytest.mark.parametrize(
    ("held", "code"),
    [
        (token(OTHER_KEY), "invalid_token"),
        (token(name="new"), "invalid_token"),
        (token(name=None), "invalid_token"),  # there are two keys
        (token(EC_KEY, "r", "ES256"), "invalid_token"),
        (token(exp=1), "invalid_token"),
        (token(exp=None), "invalid_token"),
        (token(aud="another"), "invalid_token"),
        (token(aud=None), "invalid_token"),
        (token(iss="https://login.example.org"), "invalid_token"),
        (token(azp=None), "invalid_token"),
        (token(azp=["acme"]), "invalid_token"),
        (token(azp="nobody"), "unknown_tenant"),
        (token(nbf=int(time.time()) + 3600), "invalid_token"),  # noqa: TID251
        (jwt.encode({"iss": ISSUER, "aud": "prfaas", "azp": "acme"}, None, "none"), "invalid_token"),
        (signed_with_the_public_key(), "invalid_token"),
        ("eyJ.eyJ.x", "invalid_token"),
        ("eyJ" + "x" * 20_000 + "..", "invalid_token"),
        ("sk-nobody", "invalid_api_key"),
    ],
)
def test_what_does_not_hold_opens_nothing(held: str, code: str) -> None:
    with pytest.raises(ApiError) as refusal:
        Keyring(TENANTS, (), tokens()).tenant(bearer(held))
    assert (refusal.value.status, refusal.value.code) == (401, code)
    assert held not in refusal.value.message


def basic(password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + b64encode(f"ann:{password}".encode()).decode()}


@pytest.mark.parametrize("tenants", [TENANTS, {}])
def test_a_token_beside_a_guess_makes_it_none_the_less_a_guess(tenants: dict[str, TenantConfig]) -> None:
    ann = OperatorConfig(name="ann", keys=(digest_of("sk-ann"),))
    keyring = Keyring(tenants, (ann,), tokens())
    old = token(exp=1)
    for beside in ("eyJx.y.z", old):
        assert keyring.standing({**basic("guess"), "x-api-key": beside}) is KeyStanding.WRONG
        assert keyring.standing({**basic("sk-ann"), "x-api-key": beside}) is KeyStanding.RIGHT
        assert keyring.standing({"x-api-key": beside}) is KeyStanding.PAST
        assert not keyring.shows_wrong({**basic("sk-ann"), "x-api-key": beside})
        assert not keyring.shows_wrong(bearer(beside))
    assert keyring.standing(basic("guess")) is KeyStanding.WRONG
    assert keyring.standing({}) is KeyStanding.NONE
    right = token()
    assert keyring.standing(bearer(right)) is (KeyStanding.RIGHT if tenants else KeyStanding.PAST)
    assert keyring.shows_wrong({**basic("guess"), "x-api-key": right})


def test_an_altered_token_does_not_hold() -> None:
    head, body, signature = token(azp="rival").split(".")
    _, other, _ = token(azp="acme").split(".")
    assert body != other
    with pytest.raises(ApiError):
        Keyring(TENANTS, (), tokens()).tenant(bearer(f"{head}.{other}.{signature}"))


def test_a_token_is_remembered_until_it_ends_or_its_key_goes() -> None:
    checked, held = tokens(), token()
    holder = checked.holder(held, "digest", 0.0)
    assert checked.holder("not looked at", "digest", 0.0) is holder
    with pytest.raises(ApiError):
        checked.holder("not looked at", "digest", holder.until_unix_s)
    checked.take_keys({"keys": KEYS["keys"][1:]})
    with pytest.raises(ApiError):
        checked.holder(held, "digest", 0.0)


@pytest.mark.parametrize("name", ["r", None])
def test_a_key_that_is_replaced_under_its_name_opens_nothing_any_more(name: str | None) -> None:
    def only(key: Any) -> dict[str, Any]:
        return {"keys": [{what: said for what, said in shown(key, name or "", "RS256").items() if said}]}

    checked, held, now = tokens(only(RSA_KEY)), token(name=name), time.time()  # noqa: TID251
    checked.holder(held, "digest", now)
    checked.take_keys(only(OTHER_KEY))
    with pytest.raises(ApiError) as refused:
        checked.holder(held, "digest", now)
    assert refused.value.code == "invalid_token"
    assert checked.holder(token(OTHER_KEY, name), "another", now).subject == "acme"


@pytest.mark.parametrize("order", [1, -1])
def test_keys_without_names_are_tried_one_after_the_other(order: int) -> None:
    unnamed = [shown(RSA_KEY, "", "RS256"), shown(EC_KEY, "", "ES256"), shown(OTHER_KEY, "", "RS256")]
    for each in unnamed:
        del each["kid"]
    checked = tokens({"keys": unnamed[::order]})
    for digest, key, algorithm in (("a", RSA_KEY, "RS256"), ("b", EC_KEY, "ES256"), ("c", OTHER_KEY, "RS256")):
        assert checked.holder(token(key, None, algorithm), digest, 0.0).subject == "acme"
    for held in (token(UNSHOWN_KEY, None), token(RSA_KEY, "r"), token(RSA_KEY, None, exp=1)):
        with pytest.raises(ApiError) as refused:
            checked.holder(held, "d", 0.0)
        assert refused.value.code == "invalid_token"


def test_what_is_remembered_is_bounded() -> None:
    checked, held = TokenVerifier(CONFIG, max_remembered=3), token()
    checked.take_keys(KEYS)
    for digest in "abcad":
        checked.holder(held, digest, 0.0)
    for digest in "acd":
        checked.holder("not looked at", digest, 0.0)
    with pytest.raises(ApiError):
        checked.holder("not looked at", "b", 0.0)


@pytest.mark.parametrize(
    "document", [{}, {"keys": []}, {"keys": [{"kty": "oct", "k": "c2VjcmV0", "kid": "s"}]}, {"keys": [{"kty": "?"}]}]
)
def test_a_document_without_keys_changes_nothing(document: dict[str, Any]) -> None:
    checked = tokens()
    with pytest.raises(ValueError, match=r"no keys?"):
        checked.take_keys(document)
    assert checked.holder(token(), "digest", 0.0).subject == "acme"


def test_only_tokens_look_like_tokens() -> None:
    assert looks_like_a_token(token())
    assert not looks_like_a_token("sk-a.b.c")


@pytest.mark.parametrize(
    "wrong",
    [
        {"issuer": "http://login.example.com", "audience": "x"},
        {"issuer": "http://127.0.0.1.evil.example", "audience": "x"},
        {"issuer": "http://localhost.evil.example", "audience": "x"},
        {"issuer": "http://127.0.0.1@evil.example/", "audience": "x"},
        {"issuer": "http://[::1", "audience": "x"},
        {"issuer": "https://", "audience": "x"},
        {"issuer": ISSUER, "audience": "x", "jwks_url": "http://127.0.0.1.evil.example/keys"},
        {"issuer": ISSUER},
        {"issuer": ISSUER, "audience": "x", "jwks_url": "file:///etc/passwd"},
        {"issuer": ISSUER, "audience": "x", "tenant_claim": ""},
    ],
)
def test_what_a_file_may_not_say(wrong: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match="oidc"):
        OidcConfig(**wrong)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8080", "http://localhost", "http://[::1]:80/", "https://a.example"])
def test_urls_whose_answers_nobody_on_the_way_can_change(url: str) -> None:
    assert OidcConfig(issuer=url, audience="x", jwks_url=url).issuer == url


class Login:
    """An identity provider."""

    def __init__(self) -> None:
        self.keys: dict[str, Any] = KEYS
        self.status = 200
        self.asked = 0
        self.url = ""

    async def discover(self, http: web.Request) -> web.Response:
        return web.json_response({"issuer": self.url, "jwks_uri": f"{self.url}/keys"}, status=self.status)

    async def show(self, http: web.Request) -> web.Response:
        self.asked += 1
        return web.json_response(self.keys, status=self.status)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Login"]:
        app = web.Application()
        app.router.add_get("/.well-known/openid-configuration", self.discover)
        app.router.add_get("/keys", self.show)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()


@on_loop
async def test_the_first_token_that_names_a_key_of_later_has_it_asked_for() -> None:
    async with Login().serving() as login:
        oidc = OidcConfig(issuer=login.url, audience="prfaas")
        checked = TokenVerifier(oidc)
        asking = asyncio.create_task(Provider(oidc, checked, lambda outcome: None, soonest_s=0.01).run())
        await until(lambda: checked.is_ready)
        login.keys = {"keys": [*KEYS["keys"], shown(OTHER_KEY, "o", "RS256")]}
        later, asked = token(OTHER_KEY, "o", iss=login.url), login.asked
        with pytest.raises(ApiError) as refused:
            checked.holder(later, "later", 0.0)
        assert refused.value.status == 401
        await until(lambda: login.asked > asked)

        def is_known() -> bool:
            with suppress(ApiError):
                return checked.holder(later, "later", 0.0).subject == "acme"
            return False

        await until(is_known)
        asking.cancel()
        await asyncio.wait([asking])


@on_loop
async def test_a_gateway_with_a_provider() -> None:
    login = Login()
    login.status = 503
    async with login.serving():
        oidc = OidcConfig(issuer=login.url, audience="prfaas")
        async with world(tenants=TENANTS, oidc=oidc) as w:
            held = token(iss=login.url)
            assert (await w.complete(headers=bearer(held))).status == 503  # whose keys are not known yet
            assert (await w.complete(headers=bearer("sk-rival"))).status == 200
            login.status = 200
            await until(lambda: w.gateway.door.tokens.is_ready)
            assert (await w.complete(headers=bearer(held))).status == 200
            # A provider that is gone: who was known stays known.
            login.status = 500
            assert (await w.complete(headers=bearer(token(iss=login.url, jti="another")))).status == 200


@on_loop
async def test_the_log_names_a_provider_that_fails_without_what_is_secret(caplog: pytest.LogCaptureFixture) -> None:
    login, outcomes = Login(), []
    login.status = 503
    async with login.serving():
        keys = f"{login.url}/keys"
        config = OidcConfig(issuer=ISSUER, audience="x", jwks_url=keys + "?code=hidden")
        asking = asyncio.create_task(Provider(config, TokenVerifier(CONFIG), outcomes.append).run())
        try:
            await until(lambda: outcomes)
        finally:
            asking.cancel()
            await asyncio.wait([asking])
    (said,) = [each.getMessage() for each in caplog.records if each.name == "prfaas.gateway.oidc"]
    assert said == f"{ISSUER}: its keys cannot be fetched, the known ones stay: {keys} answered 503"


@on_loop
async def test_a_provider_that_speaks_for_another_is_not_believed() -> None:
    login, outcomes = Login(), []
    async with login.serving():
        checked = TokenVerifier(CONFIG)
        config = OidcConfig(issuer=login.url + "/", audience="prfaas")
        asking = asyncio.create_task(Provider(config, checked, outcomes.append).run())
        try:
            await until(lambda: outcomes)
        finally:
            asking.cancel()
            await asyncio.wait([asking])
    assert outcomes[0] == "ValueError"
    assert not checked.is_ready

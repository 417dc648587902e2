"""Who asks, by signed tokens of an identity provider (OpenID Connect Core 1.0; JWT, RFC 7519) instead of keys.

[gateway.oidc]
issuer = "https://login.example.com"
audience = "prfaas"
tenant_claim = "azp"              # what in a token names the tenant: its name here, or one of its `subjects`

[gateway.oidc.operators]
audience = "prfaas-operators"     # another one: a token that is for both is refused
claim = "groups"
admin = ["prfaas-admins"]         # values of the claim that make an admin; `viewer` and `operator` alike

The provider's keys are asked for beforehand and again now and then, never while a request waits. A token that holds is
remembered by its digest until it ends, so its signature is checked once.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec
from yarl import URL

from gateway.api.openai import NOT_JSON
from gateway.auth.operator import Operator
from gateway.config.oidc import OidcConfig, OidcOperators
from gateway.errors import GatewayConfigError, Unauthorised, Unavailable
from gateway.tasks import BACKOFF_S
from transport.control.bounded import BodyTooLong, read_bounded

if TYPE_CHECKING:
    from jwt import PyJWK

log = logging.getLogger("prfaas.gateway.oidc")

ALGORITHMS: Final = (
    "RS256",
    "RS384",
    "RS512",
    "PS256",
    "PS384",
    "PS512",
    "ES256",
    "ES384",
    "ES512",
    "EdDSA",
)  # none shared
DISCOVERY: Final = "/.well-known/openid-configuration"
MAX_ANSWER_BYTES: Final = 1 << 20
MAX_TOKEN_CHARACTERS: Final = 16_384
MAX_NAME_CHARACTERS: Final = 256  # of an operator: it stands in each line of the audit log
MAX_REMEMBERED: Final = 4096  # tokens that hold
MAX_TRIED: Final = 8  # keys of one name, or of none, that a token is tried with
REFRESH_S: Final = 600.0
SOONEST_S: Final = 10.0  # between two questions, however many tokens name unknown keys
TIMEOUT_S: Final = 10.0
LEEWAY_S: Final = 30.0  # that two clocks may differ


class TokenRefused(Unauthorised):
    """A token that does not hold; `reason` says why, for logs."""

    def __init__(self, message: str, code: str, reason: str) -> None:
        super().__init__(message, code)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class TokenSubject:
    """What a token says: the tenant's `subject` or the `operator` whom it names, and until when."""

    subject: str
    until_unix_s: float
    operator: Operator | None = None


class TokenVerifier:
    """Checks tokens by the keys that it was given. Holds no clock: `now` is UNIX time, in seconds."""

    def __init__(self, config: OidcConfig, *, max_remembered: int = MAX_REMEMBERED) -> None:
        """Raises GatewayConfigError without the extra."""
        try:
            import jwt
        except ImportError as error:
            raise GatewayConfigError(
                f"oidc.issuer: tokens need the oidc extra (pip install 'prfaas[oidc]'): {error}"
            ) from error
        self._jwt = jwt
        self._config = config
        self._max_remembered = max_remembered
        self._keys: tuple[PyJWK, ...] = ()
        self._shown: frozenset[bytes] = frozenset()
        self._holders: OrderedDict[str, TokenSubject] = OrderedDict()
        self.is_ready = False
        self.terms = sha256(msgspec.json.encode(config)).hexdigest()  # other settings have other ones
        self.takes_operators = config.operators is not None
        self.wanted: Callable[[], None] = lambda: None  # is called for a token whose key is unknown

    def take_keys(self, document: Mapping[str, Any]) -> None:
        """The provider's keys from now on (JWK Set, RFC 7517). Raises ValueError for a document without any that can be used."""
        try:
            found = self._jwt.PyJWKSet.from_dict(dict(document))
        except (self._jwt.PyJWTError, AttributeError, TypeError, KeyError) as error:
            raise ValueError(f"no keys: {error}") from error
        signing = (key for key in found.keys if key.public_key_use in (None, "sig"))
        keys = tuple(key for key in signing if key.algorithm_name in ALGORITHMS)
        if not keys:
            raise ValueError("it shows no key for signatures by any of " + ", ".join(ALGORITHMS))
        # By all that is said of them, names are not enough: a provider's next key may have the last one's, or none.
        shown = frozenset(msgspec.json.encode(each, order="sorted") for each in document["keys"])
        if shown != self._shown:
            self._holders.clear()  # a key that was taken back opens nothing any more
        self._keys, self._shown, self.is_ready = keys, shown, True

    def holder(self, token: str, digest: str, now: float) -> TokenSubject:
        """Whom a token names. Raises TokenRefused, and Unavailable before there are keys."""
        if (known := self._holders.get(digest)) is not None and now < known.until_unix_s:
            self._holders.move_to_end(digest)
            return known
        holder = self._checked(token, now)
        self._holders[digest] = holder
        while len(self._holders) > self._max_remembered:
            self._holders.popitem(last=False)
        return holder

    def _checked(self, token: str, now: float) -> TokenSubject:
        if not self.is_ready:
            raise Unavailable("The identity provider's keys are not known yet.", "identity_provider")
        try:
            if len(token) > MAX_TOKEN_CHARACTERS:
                raise self._jwt.InvalidTokenError("too long")
            claims = self._claims(token)
            until = float(claims["exp"])
        # Not all versions of PyJWT refuse what is too deep, too large or no number in their own words.
        except (self._jwt.PyJWTError, ValueError, OverflowError, RecursionError, TypeError) as error:
            log.debug("a token was refused: %s", error)  # strangers can show many: the audit log paces its lines
            raise _refused(type(error).__name__) from error
        audiences = _texts(claims["aud"])
        if (operators := self._config.operators) is None or operators.audience not in audiences:
            return TokenSubject(_text(claims, self._config.tenant_claim), until)
        if self._config.takes_tenants and self._config.audience in audiences:
            raise _refused("for tenants and for operators")
        return TokenSubject("", until, self._operator(operators, claims, until))

    def _operator(self, operators: OidcOperators, claims: Mapping[str, Any], until: float) -> Operator:
        role = operators.role_of(_texts(claims.get(operators.claim)))
        if role is None:
            raise TokenRefused("The token gives no role at this gateway.", "unknown_operator", "unknown_operator")
        name = _text(claims, operators.name_claim)
        if len(name) > MAX_NAME_CHARACTERS or not name.isprintable() or name != name.strip():
            raise _refused(f"claim {operators.name_claim} is no name")
        return Operator(name, role, self._config.issuer, until, self.terms)

    def _claims(self, token: str) -> dict[str, Any]:
        name = self._jwt.get_unverified_header(token).get("kid")
        keys = [key for key in self._keys if key.key_id == name]  # several may have none (RFC 7517 §4.5)
        if not keys and name is None and len(self._keys) == 1:
            keys = list(self._keys)
        if not keys:
            self.wanted()
            raise self._jwt.InvalidKeyError("signed with a key that the provider does not publish")
        *others, last = keys[-MAX_TRIED:]
        for key in others:
            with suppress(self._jwt.InvalidSignatureError, self._jwt.InvalidAlgorithmError):
                return self._said(token, key)
        return self._said(token, last)

    def _said(self, token: str, key: "PyJWK") -> dict[str, Any]:
        return self._jwt.decode(
            token,
            key,
            algorithms=[key.algorithm_name],  # the key's own: a token cannot choose
            audience=self._config.audiences,
            issuer=self._config.issuer,
            leeway=LEEWAY_S,
            options={"require": ["exp", "iss", "aud"]},
        )


def _refused(reason: str) -> TokenRefused:
    return TokenRefused(f"The token is not accepted ({reason}).", "invalid_token", reason)


def _text(claims: Mapping[str, Any], claim: str) -> str:
    """What a claim says. Raises TokenRefused for one that is no text."""
    found = claims.get(claim)
    if not isinstance(found, str) or not found:
        raise _refused(f"no claim {claim}")
    return found


def _texts(claim: Any) -> list[str]:
    """A claim's values: one text, or a list of them."""
    return [each for each in (claim if isinstance(claim, list) else [claim]) if isinstance(each, str)]


def _told(error: Exception) -> str:
    """An error as the log may have it: aiohttp's words hold the request, with its headers and its URL's password and query."""
    if isinstance(error, aiohttp.ClientResponseError):
        return f"{_without_secrets(error.request_info.real_url)} answered {error.status}"
    if isinstance(error, aiohttp.InvalidURL):
        return "its discovery document names no URL"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _without_secrets(url: URL) -> URL:
    return url.with_user(None).with_query(None).with_fragment(None)


def looks_like_a_token(key: str) -> bool:
    """Whether this is a JWT in its compact form, not one of our keys."""
    return key.startswith("eyJ") and key.count(".") == 2


class Provider:
    """Keeps the provider's keys fresh."""

    def __init__(
        self,
        config: OidcConfig,
        tokens: TokenVerifier,
        on_asked: Callable[[str], None],
        *,
        soonest_s: float = SOONEST_S,
    ) -> None:
        """`on_asked` is told what became of each question: "ok", or a reason."""
        self._config = config
        self._soonest_s = soonest_s
        self._tokens = tokens
        self._on_asked = on_asked
        self._is_wanted = asyncio.Event()
        tokens.wanted = self._is_wanted.set

    async def run(self) -> None:
        """Asks on and on."""
        failures = 0
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as http:
            while True:
                self._is_wanted.clear()
                try:
                    self._tokens.take_keys(await self._keys(http))
                    failures = 0
                    self._on_asked("ok")
                except (aiohttp.ClientError, TimeoutError, BodyTooLong, *NOT_JSON, ValueError) as error:
                    if not failures:
                        log.warning("%s: its keys cannot be fetched, the known ones stay: %s",
                                    _without_secrets(URL(self._config.issuer)), _told(error))  # fmt: skip
                    failures += 1
                    self._on_asked(type(error).__name__)
                await self._pause(failures)

    async def _pause(self, failures: int) -> None:
        if failures and not self._tokens.is_ready:
            await asyncio.sleep(BACKOFF_S[min(failures, len(BACKOFF_S)) - 1])
            return
        await asyncio.sleep(self._soonest_s)
        try:
            async with asyncio.timeout(self._soonest_s if failures else REFRESH_S):
                await self._is_wanted.wait()
        except TimeoutError:
            return

    async def _keys(self, http: aiohttp.ClientSession) -> Mapping[str, Any]:
        url = self._config.jwks_url
        if not url:
            discovered = await self._document(http, self._config.issuer.rstrip("/") + DISCOVERY)
            url = discovered.get("jwks_uri", "")
            if not isinstance(url, str) or discovered.get("issuer") != self._config.issuer:
                raise ValueError(f"the discovery document is not that of {self._config.issuer}")
            OidcConfig(jwks_url=url)  # as safe as one that is configured
        return await self._document(http, url)

    async def _document(self, http: aiohttp.ClientSession, url: str) -> Mapping[str, Any]:
        async with http.get(url, allow_redirects=False, raise_for_status=True) as answer:
            body = await read_bounded(answer.content.iter_any(), MAX_ANSWER_BYTES)
        document = msgspec.json.decode(body)
        if not isinstance(document, dict):
            raise ValueError(f"{_without_secrets(URL(url))} gave no JSON object")
        return document

"""A caller that guesses keys waits, then is refused for a while; holders of right keys go on; memory stays bounded."""

from dataclasses import replace

import pytest

from gateway.auth.keyring import digest_of
from gateway.auth.wrong_keys import WrongKeys
from gateway.config.gateway import Strangers
from gateway.config.tenants import TenantConfig
from gateway.config.wrong_keys import WrongKeysConfig
from tests.gateway.memory.pipeline import on_memory_loop, pipeline
from transport.path.site import site_of

CONFIG = WrongKeysConfig(free=3, delay_s=0.5, max_delay_s=1.5, refuse_after=7, refuse_s=60.0, max_addresses=8)
HERE, THERE = "192.0.2.1", "192.0.2.2"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_answers_are_late_then_refused_and_later_given_again() -> None:
    clock = Clock()
    wrong = WrongKeys(CONFIG, clock)
    assert [wrong.wrong(HERE) for _ in range(6)] == [0.0, 0.0, 0.0, 0.5, 1.0, 1.5]
    assert wrong.refused_s(HERE) == 0.0
    wrong.wrong(HERE)
    assert wrong.refused_s(HERE) == 60.0
    assert wrong.refused_s(THERE) == 0.0
    clock.now += 60.0
    assert wrong.refused_s(HERE) == 0.0
    wrong.wrong(HERE)  # one more guess a minute
    assert wrong.refused_s(HERE) == 60.0
    clock.now += CONFIG.forget_s
    assert wrong.wrong(HERE) == 0.0


def test_an_address_with_a_right_key_is_left_alone_for_a_while() -> None:
    clock = Clock()
    wrong = WrongKeys(CONFIG, clock)
    for _ in range(5):
        wrong.wrong(HERE)
    wrong.right(HERE)
    assert [wrong.wrong(HERE) for _ in range(50)] == [0.0] * 50
    assert (wrong.is_good(HERE), wrong.refused_s(HERE)) == (True, 0.0)
    clock.now += CONFIG.good_s
    assert not wrong.is_good(HERE)
    assert [wrong.wrong(HERE) for _ in range(4)][-1] > 0


def test_memory_is_bounded_whatever_addresses_come() -> None:
    wrong = WrongKeys(CONFIG, Clock())
    for number in range(1000):
        wrong.wrong(f"198.51.100.{number % 256}")
        wrong.right(f"2001:db8:{number:x}::1")
    assert len(wrong) <= 2 * CONFIG.max_addresses


@pytest.mark.parametrize(
    ("address", "site"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::ffff", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("", ""),
    ],
)
def test_an_ipv6_customer_is_one_address(address: str, site: str) -> None:
    assert site_of(address) == site


def test_workers_share_what_an_address_may() -> None:
    divided = CONFIG.divided(4)
    assert (divided.free, divided.refuse_after) == (1, 2)
    assert CONFIG.divided(1) == CONFIG


class Nobody(Strangers):
    """Trusts not even this host, from which tests ask."""

    def trusts(self, address: str) -> bool:
        return False


TENANTS = {"acme": TenantConfig(keys=(digest_of("sk-acme"),))}
QUICK = replace(CONFIG, delay_s=0.01, max_delay_s=0.02)


def shown(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@on_memory_loop
async def test_a_guesser_is_held_off_with_every_key_and_on_every_path() -> None:
    async with pipeline(tenants=TENANTS, strangers=Nobody(), wrong_keys=QUICK) as w:
        found = [(await w.complete(headers=shown("sk-guess"))).status for _ in range(8)]
        assert found == [401] * 7 + [429]
        refused = await w.complete(headers=shown("sk-acme"))
        assert (refused.status, (await refused.json())["error"]["code"]) == (429, "too_many_wrong_keys")
        assert 30 < int(refused.headers["Retry-After"]) <= 75
        for path in ("/v1/models", "/metrics", "/health", "/openapi.json"):
            async with w.http.get(path, headers=shown("sk-guess")) as answer:
                assert answer.status == 429
        async with w.http.get("/health") as answer:  # who shows no key guesses none
            assert answer.status == 200


@on_memory_loop
async def test_an_address_with_a_right_key_may_show_wrong_ones() -> None:
    async with pipeline(tenants=TENANTS, strangers=Nobody(), wrong_keys=QUICK) as w:
        assert (await w.complete(headers=shown("sk-acme"))).status == 200
        for _ in range(12):
            assert (await w.complete(headers=shown("sk-guess"))).status == 401
        assert (await w.complete(headers=shown("sk-acme"))).status == 200


@on_memory_loop
async def test_this_host_and_trusted_proxies_speak_for_many() -> None:
    async with pipeline(tenants=TENANTS, wrong_keys=QUICK) as w:
        for _ in range(12):
            assert (await w.complete(headers=shown("sk-guess"))).status == 401
        assert (await w.complete(headers=shown("sk-acme"))).status == 200


@on_memory_loop
async def test_a_trusted_proxy_says_who_guesses() -> None:
    strangers = Strangers(trusted_proxies=("127.0.0.1",))
    async with pipeline(tenants=TENANTS, strangers=strangers, wrong_keys=QUICK) as w:

        async def ask(client: str, key: str) -> int:
            return (await w.complete(headers={**shown(key), "X-Forwarded-For": client})).status

        # What a client says of itself comes first, what the proxy saw of it last.
        assert [await ask(f"203.0.113.9, {HERE}", "sk-guess") for _ in range(8)] == [401] * 7 + [429]
        assert await ask(THERE, "sk-acme") == 200

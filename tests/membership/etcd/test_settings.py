"""What a file may say of an etcd."""

from pathlib import Path

import pytest

from membership.etcd.settings import EtcdConfig
from transport.control.settings import SettingsError, build


def test_endpoints_are_addresses_with_or_without_a_scheme() -> None:
    plain = EtcdConfig(endpoints=("10.0.0.1:2379", "http://127.0.0.1:2379", "[::1]:2379"))
    assert (plain.is_tls, plain.targets) == (False, ("10.0.0.1:2379", "127.0.0.1:2379", "[::1]:2379"))
    assert plain.plain_hops == ["10.0.0.1:2379"]
    secured = EtcdConfig(endpoints=("https://etcd-0:2379/", "etcd-1:2379"), authority=Path("ca.pem"))
    assert (secured.is_tls, secured.targets, secured.plain_hops) == (True, ("etcd-0:2379", "etcd-1:2379"), ())


def test_every_key_begins_with_the_prefix() -> None:
    for prefix in ("/site/a", "/site/a/"):
        assert EtcdConfig(endpoints=("127.0.0.1:2379",), prefix=prefix).root == "/site/a/nodes/"


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ({"endpoints": []}, "1 to 16 addresses"),
        ({"endpoints": ["127.0.0.1"]}, "must be host:port"),
        ({"endpoints": ["a:1", "http://a:1"]}, "every address once"),
        ({"endpoints": ["http://a:1", "https://b:1"]}, "all http or all https"),
        ({"endpoints": ["http://a:1"], "authority": "ca.pem"}, "certificates are for https"),
        ({"endpoints": ["a:1"], "certificate": "c.pem"}, "certificate and key go together"),
        ({"endpoints": ["a:1"], "certificate": "c.pem", "key": "c.key"}, "would not be shown: use https"),
        ({"endpoints": ["a:1"], "user": "gateway"}, "user and password_file go together"),
        ({"endpoints": ["10.0.0.1:1"], "user": "gateway", "password_file": "p"}, "in clear: use https"),
        ({"endpoints": ["a:1"], "prefix": ""}, "prefix = ''"),
        ({"endpoints": ["a:1"], "prefx": ""}, "did you mean 'prefix'"),
        ({}, "missing: endpoints"),
    ],
)
def test_what_makes_no_sense_is_refused(table: dict[str, object], why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        build(EtcdConfig, table, "[gateway.membership.etcd]")

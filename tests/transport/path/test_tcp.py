"""Addresses."""

import pytest

from transport.path.tcp import format_address, parse_address


@pytest.mark.parametrize("address", ["localhost", ":80", "host:", "host:99999", "host:-1"])
def test_refuses_what_is_no_address(address: str) -> None:
    with pytest.raises(ValueError, match="not host:port"):
        parse_address(address)


def test_ipv6_addresses_keep_their_brackets() -> None:
    assert parse_address("[::1]:80") == ("::1", 80)
    assert format_address("::1", 80) == "[::1]:80"

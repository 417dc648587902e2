"""Addresses."""

import socket
from pathlib import Path

import pytest

from transport.path.tcp import format_address, free_port, lasting_port, listen, parse_address


@pytest.mark.parametrize("address", ["localhost", ":80", "host:", "host:99999", "host:-1"])
def test_refuses_what_is_no_address(address: str) -> None:
    with pytest.raises(ValueError, match="not host:port"):
        parse_address(address)


def test_ipv6_addresses_keep_their_brackets() -> None:
    assert parse_address("[::1]:80") == ("::1", 80)
    assert format_address("::1", 80) == "[::1]:80"


def test_a_port_of_either_family_is_found() -> None:
    assert free_port("127.0.0.1")
    assert free_port("::1")
    assert lasting_port("::1")


def test_a_lasting_port_is_none_that_the_kernel_gives() -> None:
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    port = lasting_port("127.0.0.1")
    assert port < low
    with socket.create_server(("127.0.0.1", port)):
        assert lasting_port("127.0.0.1") != port


def test_any_address_of_ipv6_is_any_of_ipv4_too() -> None:
    with listen("::", 0) as listener:
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, listener.getsockname()[1])).close()
    with listen("::1", 0) as listener, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", listener.getsockname()[1])).close()

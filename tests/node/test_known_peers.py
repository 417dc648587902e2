"""Whom a node exchanges KVCache with."""

import pytest

from node.errors import NodeRefusal
from node.known_peers import NOT_A_PEER, NOT_YET, KnownPeers


@pytest.mark.parametrize(
    ("names", "place", "is_known"),
    [
        ((), "anywhere/at-all", True),
        ((), "", True),
        (("west/d0",), "west/d0", True),
        (("west/d0",), "west/d1", False),
        (("west/*", "east/p0"), "west/d1", True),
        (("west/*", "east/p0"), "east/p1", False),
        (("*/d0",), "north/d0", True),
        (("*/*",), "north/d0", True),
        (("west/*",), "", False),
        (("west/*",), "western/d0", False),
    ],
)
def test_names(names: tuple[str, ...], place: str, is_known: bool) -> None:
    peers = KnownPeers(names)
    if is_known:
        peers.require_name(place)
        return
    with pytest.raises(NodeRefusal, match="not among `peers`") as refused:
        peers.require_name(place)
    assert refused.value.label == NOT_A_PEER


@pytest.mark.parametrize(
    ("networks", "address", "is_known"),
    [
        ((), "db.internal:5432", True),
        (("10.0.0.0/16",), "10.0.3.4:7101", True),
        (("10.0.0.0/16",), "10.1.3.4:7101", False),
        (("10.0.0.0/16",), "db.internal:5432", False),
        (("fd00::/8",), "[fd00::1]:7101", True),
        (("fd00::/8",), "[fe80::1]:7101", False),
        (("10.0.0.0/16", "fd00::/8"), "[::1]:7101", False),
        (("10.0.0.0/16",), "[::ffff:10.0.3.4]:7101", True),  # the same machine, as an IPv6 socket calls it
        (("10.0.0.0/16",), "[::ffff:10.1.3.4]:7101", False),
        (("::/0",), "[::ffff:10.0.3.4]:7101", False),  # IPv4 is no part of it
    ],
)
def test_networks(networks: tuple[str, ...], address: str, is_known: bool) -> None:
    peers = KnownPeers((), networks)
    if is_known:
        peers.require_address(address)
        return
    with pytest.raises(NodeRefusal, match="peer_networks"):
        peers.require_address(address)


def test_a_ticket_without_a_sender_is_for_no_node_where_there_is_a_list() -> None:
    assert KnownPeers().awaited("") == ""
    assert KnownPeers().awaited("north/d0") == "north/d0"
    assert KnownPeers(("west/*",)).awaited("west/d0") == "west/d0"
    assert KnownPeers(("*/*",)).awaited("") == NOT_YET
    with pytest.raises(NodeRefusal):
        KnownPeers(("west/*",)).awaited("north/d0")


@pytest.mark.parametrize("name", ["west", "/d0", "west/", "west/a/b", ""])
def test_what_is_no_name_is_named(name: str) -> None:
    with pytest.raises(ValueError, match="must be CLUSTER/NAME"):
        KnownPeers((name,))


def test_what_is_no_network_is_named() -> None:
    with pytest.raises(ValueError, match=r"'10\.0\.0\.1/16' must be a network such as"):
        KnownPeers((), ("10.0.0.1/16",))

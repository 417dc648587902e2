"""Which nodes a node exchanges KVCache with, by its own file: what others tell it to do goes no further than that."""

from collections.abc import Sequence
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from node.errors import NodeRefusal

ANY = "*"
NOT_YET = "?/?"  # the place of no node
NOT_A_PEER = "not_a_peer"
Network = IPv4Network | IPv6Network


class KnownPeers:
    """Names as CLUSTER/NAME, where either part may be "*", and networks that peers are called in. Empty: any."""

    def __init__(self, names: Sequence[str] = (), networks: Sequence[str] = ()) -> None:
        """Raises ValueError, which names what is no name or network."""
        self._names = frozenset(_parts(name) for name in names)
        self._networks = tuple(_network(text) for text in networks)

    def awaited(self, place: str) -> str:
        """Who may send for a ticket that names `place` as its sender; "": any node. Raises NodeRefusal.

        Where there is a list, a ticket without a sender is good for no node until it is readdressed.
        """
        if place:
            self.require_name(place)
        return place or (NOT_YET if self._names else "")

    def require_name(self, place: str) -> None:
        """Raises NodeRefusal unless the node `place` is one of them."""
        cluster, _, name = place.partition("/")
        if self._names and self._names.isdisjoint({(cluster, name), (cluster, ANY), (ANY, name), (ANY, ANY)}):
            raise NodeRefusal(
                NOT_A_PEER, f"{place or 'a node without a name'} is not among `peers` of this node's file"
            )

    def require_address(self, address: str) -> None:
        """Raises NodeRefusal unless `address`, HOST:PORT, is in one of the networks. A name is in none of them."""
        if not self._networks:
            return
        host = address.rpartition(":")[0].strip("[]")
        try:
            at = ip_address(host)
        except ValueError:
            raise NodeRefusal(NOT_A_PEER, f"{host!r} is no IP address, and this node has `peer_networks`") from None
        if isinstance(at, IPv6Address):
            at = at.ipv4_mapped or at  # as which it is called
        if not any(at in network for network in self._networks):
            raise NodeRefusal(NOT_A_PEER, f"{host} is in none of `peer_networks` of this node's file")


def _parts(text: str) -> tuple[str, str]:
    cluster, slash, name = text.partition("/")
    if not (cluster and slash and name) or "/" in name:
        raise ValueError(f"{text!r} must be CLUSTER/NAME, or CLUSTER/* for all nodes of a cluster")
    return cluster, name


def _network(text: str) -> Network:
    try:
        return ip_network(text)
    except ValueError as exc:
        raise ValueError(f"{text!r} must be a network such as 10.0.0.0/16: {exc}") from None

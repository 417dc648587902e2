"""Drained links in etcd: a key for each, with the gateway that drained it.

PREFIX/gateways/drained/SOURCE/DESTINATION
"""

from typing import Final
from urllib.parse import quote, unquote

from gateway.cluster.drained_links import Link
from gateway.fleet.errors import FleetFailed
from membership.errors import EtcdFailed
from membership.etcd.client import EtcdClient
from membership.etcd.pages import key_range
from membership.etcd.settings import EtcdConfig
from transport.control.proto.etcd_pb2 import DeleteRangeRequest, RequestOp, TxnRequest

DRAINED: Final = "drained/"
MOST_LINKS: Final = 4096


class EtcdDrains:
    """The list of one fleet, as the gateway `name` changes it. Every method blocks, and raises FleetFailed."""

    def __init__(self, config: EtcdConfig, name: str, client: EtcdClient | None = None) -> None:
        self._root = f"{config.fleet_root}{DRAINED}"
        self._name = name
        self._client = client or EtcdClient(config)

    def links(self) -> frozenset[Link]:
        """All of them."""
        begin, end = key_range(self._root)
        try:
            page = self._client.range(begin, end, limit=MOST_LINKS + 1)
        except EtcdFailed as failure:
            raise FleetFailed(failure.reason, str(failure)) from failure
        if len(page.kvs) > MOST_LINKS:
            raise FleetFailed("too_many", f"{self._root}: more than {MOST_LINKS} links")
        names = (kv.key.decode(errors="replace").removeprefix(self._root) for kv in page.kvs)
        pairs = (name.partition("/") for name in names)
        return frozenset((unquote(source), unquote(to)) for source, _, to in pairs if source and to)

    def set(self, link: Link, is_drained: bool) -> None:
        """Drains a link, or has it used again."""
        key = f"{self._root}{'/'.join(quote(name, safe='') for name in link)}".encode()
        try:
            if is_drained:
                self._client.put(key, self._name.encode())
            else:
                gone = RequestOp(request_delete_range=DeleteRangeRequest(key=key))
                self._client.transact(TxnRequest(success=[gone]))
        except EtcdFailed as failure:
            raise FleetFailed(failure.reason, str(failure)) from failure

    def close(self) -> None:
        """For good."""
        self._client.close()

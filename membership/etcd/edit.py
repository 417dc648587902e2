"""Lists a node in etcd for good, or no longer: what operators do. Nodes that list themselves are not theirs to remove."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from membership.documents import entry_text
from membership.errors import EditRefused, SourceFailed
from membership.etcd.client import EtcdClient
from membership.etcd.listing import LISTED, EtcdListing
from membership.etcd.pages import BEGIN_S, read_all
from membership.etcd.settings import EtcdConfig
from membership.member import Member
from transport.control.proto.etcd_pb2 import Compare, DeleteRangeRequest, PutRequest, RequestOp, TxnRequest


class EtcdEditor:
    """Changes of one etcd. Every method raises EditRefused."""

    kind = "etcd"

    def __init__(self, config: EtcdConfig) -> None:
        self._config = config

    @property
    def where(self) -> str:
        return f"etcd {self._config.root}{LISTED}"

    def add(self, member: Member) -> None:
        """Lists one more node."""
        with self._client() as client:
            for known in self._members(client).values():
                if known.id == member.id:
                    raise EditRefused(f"{self.where} has {member.id} already, at {known.agent}; remove it first")
                if known.agent == member.agent:
                    raise EditRefused(f"{self.where} has {member.agent} already, as {known.id}")
            key = self._key(member)
            is_new = Compare(result=Compare.EQUAL, target=Compare.CREATE, key=key, create_revision=0)
            put = PutRequest(key=key, value=entry_text(member, 0.0))
            if not client.transact(TxnRequest(compare=[is_new], success=[RequestOp(request_put=put)])).succeeded:
                raise EditRefused(f"{self.where} has {member.id} already; remove it first")

    def remove(self, node: str) -> Member:
        """Lists a node no longer, named by its id or its agent's address; returns what it was."""
        with self._client() as client:
            members = self._members(client)
            meant = {name: each for name, each in members.items() if node in (each.id, each.agent)}
            name = next((name for name in meant if name.startswith(LISTED)), None)
            if name is None and meant:
                raise EditRefused(f"{node} lists itself in etcd: end the node, and it is listed no more")
            if name is None:
                known = ", ".join(sorted({each.id for each in members.values()})) or "none"
                raise EditRefused(f"{self.where} has no {node}; etcd lists {known}")
            if len(members) == 1:
                raise EditRefused(f"{node} is the last node in etcd: gateways keep the last one, so stop them instead")
            gone = DeleteRangeRequest(key=f"{self._config.root}{name}".encode())
            client.transact(TxnRequest(success=[RequestOp(request_delete_range=gone)]))
            return meant[name]

    def _key(self, member: Member) -> bytes:
        return f"{self._config.root}{LISTED}{member.id}".encode()

    def _members(self, client: EtcdClient) -> Mapping[str, Member]:
        listing = EtcdListing(self._config.root)
        listing.snapshot(read_all(client, self._config.root, time.monotonic() + BEGIN_S), 0.0)
        return listing.members_by_name()

    @contextmanager
    def _client(self) -> Iterator[EtcdClient]:
        client = EtcdClient(self._config)
        try:
            yield client
        except SourceFailed as failure:
            raise EditRefused(str(failure)) from failure
        finally:
            client.close()

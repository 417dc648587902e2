"""How a node says in etcd that it is there: a key of its own under a lease, which it renews while it lives."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from membership.documents import entry_text
from membership.errors import EtcdFailed
from membership.etcd.client import EtcdClient
from membership.etcd.listing import FAREWELL, LEASE_S, REGISTERED
from membership.etcd.settings import EtcdConfig
from membership.member import Member
from transport.control.proto.etcd_pb2 import (
    Compare,
    DeleteRangeRequest,
    EtcdKeyValue,
    PutRequest,
    RequestOp,
    TxnRequest,
)

log = logging.getLogger(__name__)

NO_LEASE: Final = 0


class EtcdEntry:
    """The key of one node: see `membership.registration.NodeEntry`. Every method may block, and raises OSError."""

    def __init__(
        self, config: EtcdConfig, member: Member, lease_s: float = LEASE_S, client: EtcdClient | None = None
    ) -> None:
        self._key = f"{config.root}{REGISTERED}{member.id}"
        self._client = client or EtcdClient(config)
        self._text = entry_text(member, lease_s)
        self._lease_s = lease_s
        self._lease = NO_LEASE
        self._written_at = 0  # the revision of what we put there

    @property
    def where(self) -> str:
        return f"{self._client.where}: {self._key}"

    def write(self) -> None:
        """Registers under a new lease; what another process has put there is replaced."""
        with _as_os_error():
            self._put()

    def beat(self) -> bool:
        """Renews the lease; registers anew where etcd has lost it. False: the key is another process's.

        What was put there before we wrote is back because etcd was restored: it is replaced.
        """
        with _as_os_error():
            if self._lease != NO_LEASE and not self._client.keep_alive(self._lease):
                self._lease = NO_LEASE
            found = self._found()
            if found is not None and found.lease != self._lease and found.value != self._text:
                if found.mod_revision >= self._written_at:
                    return False
                log.warning("%s: an older entry is back, as etcd was restored; it is replaced", self.where)
            if found is None or self._lease == NO_LEASE or found.lease != self._lease or found.value != self._text:
                self._put()
            return True

    def remove(self) -> None:
        """The node has left, and says so first. The key is not touched where it is another process's."""
        try:
            with _as_os_error():
                if self._lease == NO_LEASE:
                    return
                bye = PutRequest(key=self._key.encode(), value=FAREWELL, lease=self._lease)
                said_at = self._if_ours(self._written_at, RequestOp(request_put=bye))
                if said_at:
                    gone = DeleteRangeRequest(key=self._key.encode())
                    self._if_ours(said_at, RequestOp(request_delete_range=gone))
                self._client.revoke(self._lease)
        finally:
            self._client.close()

    def _put(self) -> None:
        lease, self._lease = self._lease, NO_LEASE
        if lease == NO_LEASE:
            lease = self._client.grant(self._lease_s)
        self._written_at = self._client.put(self._key.encode(), self._text, lease)
        self._lease = lease

    def _found(self) -> EtcdKeyValue | None:
        return next(iter(self._client.range(self._key.encode()).kvs), None)

    def _if_ours(self, revision: int, change: RequestOp) -> int:
        """The revision of a change that is made only if nothing has changed the key since `revision`; 0: something has."""
        unchanged = Compare(result=Compare.EQUAL, target=Compare.MOD, key=self._key.encode(), mod_revision=revision)
        answer = self._client.transact(TxnRequest(compare=[unchanged], success=[change]))
        return answer.header.revision if answer.succeeded else 0


@contextmanager
def _as_os_error() -> Iterator[None]:
    """As a folder would fail."""
    try:
        yield
    except EtcdFailed as failure:
        raise OSError(str(failure)) from failure

"""Where all claims lie in etcd: a key for each gateway, and one that changes when a claim grows.

PREFIX/gateways/limits/turn           changed with every claim that grows: it names the last revision of this one
PREFIX/gateways/limits/claims/NAME    of one gateway
"""

from collections.abc import Sequence
from typing import Final

from gateway.config.fleet import MOST_GATEWAYS
from gateway.fleet.claim_documents import FoundClaim, FoundClaims, read, written
from gateway.fleet.claims import GatewayClaim
from gateway.fleet.errors import FleetFailed
from membership.errors import EtcdFailed
from membership.etcd.client import EtcdClient
from membership.etcd.pages import key_range
from membership.etcd.settings import EtcdConfig
from transport.control.proto.etcd_pb2 import Compare, DeleteRangeRequest, PutRequest, RequestOp, TxnRequest

LIMITS: Final = "limits/"
TURN: Final = "turn"
CLAIMS: Final = "claims/"


class EtcdClaims:
    """The claims of one fleet. Every method blocks, and raises FleetFailed."""

    def __init__(self, config: EtcdConfig, client: EtcdClient | None = None) -> None:
        self._root = f"{config.fleet_root}{LIMITS}"
        self._client = client or EtcdClient(config)

    def read(self) -> FoundClaims:
        """What all gateways claim."""
        begin, end = key_range(self._root)
        try:
            page = self._client.range(begin, end, limit=MOST_GATEWAYS + 1)  # and the turn
        except EtcdFailed as failure:
            raise FleetFailed(failure.reason, str(failure)) from failure
        if page.more:
            raise FleetFailed("too_many", f"{self._root}: more than {MOST_GATEWAYS} gateways")
        turn, found = 0, dict[str, FoundClaim]()
        for kv in page.kvs:
            name = kv.key.decode(errors="backslashreplace").removeprefix(self._root)
            if name == TURN:
                turn = kv.mod_revision
            elif name.startswith(CLAIMS):
                name = name.removeprefix(CLAIMS)
                claim, process = read(name, kv.value)
                found[name] = FoundClaim(claim, kv.mod_revision, process)
        return FoundClaims(turn, found)

    def write(self, claim: GatewayClaim, process: str, turn: int, forgotten: Sequence[str] = ()) -> bool:
        """Changes one gateway's claim, and forgets others. False: another claim has grown since `turn`."""
        is_last = Compare(result=Compare.EQUAL, target=Compare.MOD, key=self._key(TURN), mod_revision=turn)
        changes = [
            RequestOp(request_put=PutRequest(key=self._key(TURN))),
            self._put(claim, process),
            *(
                RequestOp(request_delete_range=DeleteRangeRequest(key=self._key(f"{CLAIMS}{name}")))
                for name in forgotten
            ),
        ]
        return self._transacted(is_last, changes)

    def renew(self, claim: GatewayClaim, process: str, revision: int) -> bool:
        """Changes a claim that does not grow, whatever others do. False: it is no longer that of `revision`."""
        key = self._key(f"{CLAIMS}{claim.name}")
        is_same = Compare(result=Compare.EQUAL, target=Compare.MOD, key=key, mod_revision=revision)
        return self._transacted(is_same, [self._put(claim, process)])

    def close(self) -> None:
        """For good."""
        self._client.close()

    def _put(self, claim: GatewayClaim, process: str) -> RequestOp:
        key = self._key(f"{CLAIMS}{claim.name}")
        return RequestOp(request_put=PutRequest(key=key, value=written(claim, process)))

    def _transacted(self, if_so: Compare, changes: Sequence[RequestOp]) -> bool:
        try:
            return bool(self._client.transact(TxnRequest(compare=[if_so], success=changes)).succeeded)
        except EtcdFailed as failure:
            raise FleetFailed(failure.reason, str(failure)) from failure

    def _key(self, name: str) -> bytes:
        return f"{self._root}{name}".encode()

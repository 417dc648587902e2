"""Pairing by rooms: how SGLang's servers find each other, and what their failures are called here.

Both servers of a request are sent the client's whole body and a room: where the one that prefills is asked for, and a number that
no other request has. The one that decodes reserves its own pages, asks the other by the number, and answers the client.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from gateway.cluster.node import ClusterNode
from gateway.errors import DecodeFailed, PrefillFailed
from planner.decisions.failures.retries import FailureKind
from planner.decisions.links.paths import PATH_FAILED

BITS: Final = 62  # of a room's number, which is a signed 64-bit integer to SGLang
DECODE_ABORTED: Final = "decode_aborted"
# What our backend says in the text of an SGLang error (`engine.sglang`), where that tells more than its status.
TOLD: Final = (
    ("decode has aborted the request", DECODE_ABORTED),
    *((label, label) for label in ("no_capacity", PATH_FAILED, "draining", "agent_gone", "landing_timeout")),
)
GONE: Final = frozenset({FailureKind.UNREACHABLE, FailureKind.LOST, FailureKind.DIED})
# Failures that are the decode server's own, whatever the other one says of the same room.
OF_DECODE: Final = GONE | {FailureKind.FULL, FailureKind.AWAY}


@dataclass(frozen=True, slots=True)
class BootstrapRoom:
    """One try of a request at a pair of servers. `host` and `port` are of the prefill server's bootstrap."""

    host: str
    port: int
    number: int

    def fields(self) -> dict[str, Any]:
        """What is set in the body for either server."""
        return {"bootstrap_host": self.host, "bootstrap_port": self.port, "bootstrap_room": self.number}


def room_at(prefill: ClusterNode, draw: Callable[[int], int]) -> BootstrapRoom:
    """A new room at a node that prefills; `draw` gives that many random bits."""
    assert prefill.info is not None
    assert prefill.info.rooms is not None
    return BootstrapRoom(prefill.info.rooms.host, prefill.info.rooms.port, draw(BITS))


def label_in(message: str) -> str | None:
    """Our backend's reason in an error of SGLang's, if there is one."""
    return next((label for words, label in TOLD if re.search(rf"\b{words}\b", message)), None)


def is_certain(error: PrefillFailed | DecodeFailed) -> bool:
    """Whether a failure is that node's, whatever the other server says: its server is gone."""
    return error.failure in GONE


def to_blame(prefill: PrefillFailed | None, decode: DecodeFailed | None) -> PrefillFailed | DecodeFailed:
    """Given that a server of the pair failed, the failure whose node should be replaced."""
    if prefill is None or decode is None:
        blamed = prefill or decode
        assert blamed is not None
        return blamed
    # A prefill server that fails tells the other one, and the other way round: who was told is not to blame.
    return decode if prefill.reason == DECODE_ABORTED or decode.failure in OF_DECODE else prefill

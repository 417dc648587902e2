"""Who may do what: a cell for each operation and role. What is not here, no role may do.

    operation                 gateway   prefill   node      planner   operator
    describe                  yes       -         -         yes       yes
    reserve, watch, ask ...   yes       -         -         -         -
    convert                   -         -         -         yes       yes
    drain, undrain            -         -         -         -         yes
    picked requests: ask      yes       -         -         -         -
    picked requests: a leg    -         -         yes       -         -
    KVCache: send, receive    -         yes       yes       -         -
    plans: read, change       yes       -         -         -         yes
    plans: answer             -         -         -         yes       -

A proxy that asks nodes for picked requests shows a gateway's certificate. A gateway neither drains nor converts:
`prfaas drain` and `prfaas convert` show an operator's certificate, the plan service its own. `prfaas check` asks as
the gateway does, with the gateway's. What operators do to plans in the console comes through the gateway, which has
looked at the operator's role.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from transport.peers.name import PeerRole

Roles = frozenset[PeerRole]

GATEWAY: Final = frozenset({PeerRole.GATEWAY})
NODES: Final = frozenset({PeerRole.PREFILL, PeerRole.NODE})
CONVERTS: Final = frozenset({PeerRole.PLANNER, PeerRole.OPERATOR})
DECODES: Final = frozenset({PeerRole.NODE})
PLANNER: Final = frozenset({PeerRole.PLANNER})
OPERATOR: Final = frozenset({PeerRole.OPERATOR})
NOBODY: Final[Roles] = frozenset()

RPCS: Final[Mapping[str, Roles]] = {
    "Describe": GATEWAY | CONVERTS,
    "Reserve": GATEWAY,
    "Commit": GATEWAY,
    "Abort": GATEWAY,
    "Readdress": GATEWAY,
    "Load": GATEWAY,
    "DropPrefix": GATEWAY,
    "Probe": GATEWAY,
    "Watch": GATEWAY,
    "ShareEgress": GATEWAY,
    "CreateContext": GATEWAY,
    "ExtendContext": GATEWAY,
    "DeleteContext": GATEWAY,
    "Drain": OPERATOR,
    "Undrain": OPERATOR,
    "Convert": CONVERTS,
}
CALLS: Final[Mapping[str, Roles]] = {"reserve": GATEWAY, "abort": GATEWAY, "introduce": GATEWAY}
# A probe is an Open of a transfer that is not expected. What follows an Open is bound to the landing that it opened.
SAID_BY_SENDERS: Final = (
    "Hello", "Open", "Chunk", "CodedChunk", "Reference", "Abort", "Ping", "Pong", "Goodbye",
    "AskRails", "RailOffer", "RailClosed", "Written",
)  # fmt: skip
SAID_BY_RECEIVERS: Final = (
    "Welcome", "Accept", "Refuse", "Ack", "Nack", "Cancel",
    "Nics", "Grant", "LandingBuffers", "RailBuffer", "RailAnswer",
)  # fmt: skip
# Sending asks the receiver for its right to send, receiving the sender for its right to have it.
FRAMES: Final[Mapping[str, Roles]] = dict.fromkeys(SAID_BY_SENDERS + SAID_BY_RECEIVERS, NODES)

SEND: Final = "transfer.Open"
GREET: Final = "transfer.Hello"
RECEIVE: Final = "transfer.Accept"
ASK_ENGINE: Final = "engine.ask"
ASK_PICKED: Final = "picked.ask"
ASK_LEG: Final = "picked.prefill"
CALL_PICKED: Final = "picked.call"
SERVE: Final = "node.serve"
READ_PLAN: Final = "plan.read"
CHANGE_PLAN: Final = "plan.change"
SERVE_PLAN: Final = "plan.serve"
SERVE_LOAD: Final = "gateway.serve"
RIGHTS: Final[Mapping[str, Roles]] = MappingProxyType(
    {f"rpc.{name}": roles for name, roles in RPCS.items()}
    | {f"call.{name}": roles for name, roles in CALLS.items()}
    | {f"transfer.{name}": roles for name, roles in FRAMES.items()}
    | {ASK_ENGINE: GATEWAY, SERVE: NODES}  # what is said to engines; who answers gateways
    | {ASK_PICKED: GATEWAY, ASK_LEG: DECODES, CALL_PICKED: GATEWAY | DECODES}  # of proxies, and of each other
    | {READ_PLAN: GATEWAY | OPERATOR, CHANGE_PLAN: GATEWAY | OPERATOR}
    | {SERVE_PLAN: PLANNER, SERVE_LOAD: GATEWAY}  # who answers those, and the plan service's questions
)


def may(role: PeerRole, operation: str) -> bool:
    """Whether such a peer may do that."""
    return role in RIGHTS.get(operation, NOBODY)


def holders(operation: str) -> str:
    """Who may, in words."""
    return " or ".join(sorted(RIGHTS.get(operation, NOBODY))) or "no role"

"""A claim as it lies in the registry: JSON, within bounds, and believed only where every number can be."""

from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from gateway.fleet.claims import MOST_WANTED, GatewayClaim
from gateway.fleet.errors import FleetFailed
from gateway.ratelimit.limiter import ROWS
from gateway.ratelimit.parts import Parts

MAX_BYTES: Final = 1 << 20  # etcd takes 1.5 MiB
MAX_NAME_CHARS: Final = 128
_PartOfOne = Annotated[float, Meta(ge=0.0, le=1.0)]
_Wanted = Annotated[float, Meta(ge=0.0, le=MOST_WANTED)]
_Tenant = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]


class FoundClaim(NamedTuple):
    """A claim that lies in the registry, and the process that wrote it."""

    claim: GatewayClaim
    revision: int
    process: str


class FoundClaims(NamedTuple):
    """All of one moment. `turn` is what a change of them must name."""

    turn: int
    by_name: dict[str, FoundClaim]


class ClaimDocument(msgspec.Struct, frozen=True, kw_only=True):
    """`process` is whose it is: two gateways with one name would change each other's."""

    process: Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
    fair: _PartOfOne
    parts: Annotated[dict[_Tenant, tuple[_PartOfOne, _PartOfOne, _PartOfOne]], Meta(max_length=ROWS)] = {}
    wanted: Annotated[dict[_Tenant, tuple[_Wanted, _Wanted, _Wanted]], Meta(max_length=ROWS)] = {}
    is_leaving: bool = False


def written(claim: GatewayClaim, process: str) -> bytes:
    """A claim for the registry."""
    document = ClaimDocument(
        process=process,
        fair=claim.fair,
        parts=dict(claim.parts),
        wanted=dict(claim.wanted),
        is_leaving=claim.is_leaving,
    )
    return msgspec.json.encode(document)


def read(name: str, data: bytes) -> tuple[GatewayClaim, str]:
    """The claim of a gateway, and the process that wrote it. Raises FleetFailed."""
    if len(data) > MAX_BYTES:
        raise FleetFailed("malformed", f"what gateway {name[:MAX_NAME_CHARS]} claims is longer than {MAX_BYTES} bytes")
    try:
        document = msgspec.json.decode(data, type=ClaimDocument)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FleetFailed("malformed", f"what gateway {name[:MAX_NAME_CHARS]} claims: {error}") from error
    claim = GatewayClaim(
        name=name,
        fair=document.fair,
        parts={tenant: Parts(*parts) for tenant, parts in document.parts.items()},
        wanted={tenant: Parts(*parts) for tenant, parts in document.wanted.items()},
        is_leaving=document.is_leaving,
    )
    return claim, document.process

"""Messages between a decode server and a prefill server, over SGLang's own sockets.

    decode                                                    prefill
      | Offer: pages to fill, and the ticket for them  ------>  |   the request may be computed
      |                    (pages travel from agent to agent)   |
      | <------  Auxiliary: first token, logprobs, ...          |
      | <------  status, as of SGLang's own backends            |

Frames are bytes, and the first says which message it is. Each is checked when it is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from transport.control.messages import TicketInfo

OFFER: Final = b"PRFAAS_OFFER"
AUXILIARY: Final = b"PRFAAS_AUX"
STATUS: Final = b"PRFAAS_STATUS"
MAX_OFFER_BYTES: Final = 1 << 16
MAX_AUXILIARY_BUFFERS: Final = 64


class RendezvousError(ValueError):
    """Frames that are no such messages, or broken ones."""


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """The destination of one request's pages. `ticket`: for `num_pages` of them; None where there is nothing to send.

    Status and auxiliary data go to `endpoint` and `dst_port`, which are named as SGLang reads them; so is `is_dummy`.
    """

    room: int
    endpoint: str
    dst_port: int
    num_pages: int
    decode_prefix_len: int
    ticket: TicketInfo | None
    is_dummy: bool = False


@dataclass(frozen=True, slots=True)
class Auxiliary:
    """A request's data beside pages: one item of each of SGLang's metadata buffers."""

    room: int
    items: tuple[bytes, ...]


_encoder = msgspec.msgpack.Encoder()
_offers = msgspec.msgpack.Decoder(Offer)


def offer_frames(offer: Offer) -> list[bytes]:
    """As it is sent."""
    return [OFFER, _encoder.encode(offer)]


def read_offer(frames: Sequence[bytes]) -> Offer:
    """Raises RendezvousError."""
    if len(frames) != 2 or frames[0] != OFFER or len(frames[1]) > MAX_OFFER_BYTES:
        raise RendezvousError("no offer")
    try:
        offer = _offers.decode(frames[1])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise RendezvousError(f"an offer that cannot be read: {exc}") from exc
    if offer.num_pages < 0 or (offer.num_pages > 0) != (offer.ticket is not None):
        raise RendezvousError(f"an offer of {offer.num_pages} pages with {'a' if offer.ticket else 'no'} ticket")
    return offer


def auxiliary_frames(auxiliary: Auxiliary) -> list[bytes]:
    """As it is sent."""
    return [AUXILIARY, str(auxiliary.room).encode("ascii"), *auxiliary.items]


def read_auxiliary(frames: Sequence[bytes]) -> Auxiliary:
    """Raises RendezvousError."""
    if not 2 <= len(frames) <= 2 + MAX_AUXILIARY_BUFFERS or frames[0] != AUXILIARY:
        raise RendezvousError("no auxiliary data")
    if not frames[1].isdigit():
        raise RendezvousError(f"auxiliary data of room {frames[1]!r}")
    return Auxiliary(int(frames[1]), tuple(frames[2:]))

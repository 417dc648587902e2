"""Frames between decode and prefill servers, whole and broken."""

import pytest

from engine.sglang.disaggregation.rendezvous import (
    AUXILIARY,
    OFFER,
    Auxiliary,
    Offer,
    RendezvousError,
    auxiliary_frames,
    offer_frames,
    read_auxiliary,
    read_offer,
)
from transport.control.messages import TicketInfo

TICKET = TicketInfo(
    transfer_id="t", secret=b"s", num_tokens=32, have_tokens=0, tokens_digest=b"d", endpoints=(("tcp", "h:1", ""),),
    ttl_s=1.0, layout_fingerprint="f", node_id="n", cluster="c",
)  # fmt: skip
PLACE = {"room": 1 << 62, "endpoint": "::1", "dst_port": 9, "decode_prefix_len": 16}


@pytest.mark.parametrize(
    "offer", [Offer(**PLACE, num_pages=2, ticket=TICKET), Offer(**PLACE, num_pages=0, ticket=None)]
)
def test_an_offer_arrives_as_it_was_said(offer):
    assert read_offer(offer_frames(offer)) == offer


def test_auxiliary_data_arrives_as_it_was_said():
    said = Auxiliary(7, (b"", b"token", b"\0" * 64))
    assert read_auxiliary(auxiliary_frames(said)) == said


@pytest.mark.parametrize("frames", [
    [], [OFFER], [OFFER, b""], [OFFER, b"\xc1"], [OFFER, b"x" * (1 << 17)], [b"None", b"x"],
    offer_frames(Offer(**PLACE, num_pages=0, ticket=TICKET)), offer_frames(Offer(**PLACE, num_pages=-1, ticket=None)),
    offer_frames(Offer(**PLACE, num_pages=2, ticket=None)),
    [OFFER, b"\x81\xa7unknown" + b"\x91" * 60_000],
])  # fmt: skip
def test_a_broken_offer_is_an_error(frames):
    with pytest.raises(RendezvousError):
        read_offer(frames)


@pytest.mark.parametrize(
    "frames", [[], [AUXILIARY], [AUXILIARY, b"-1"], [AUXILIARY, b"x", b"y"], [AUXILIARY, b"1", *[b""] * 65]]
)
def test_broken_auxiliary_data_is_an_error(frames):
    with pytest.raises(RendezvousError):
        read_auxiliary(frames)

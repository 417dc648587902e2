"""What is put together of frames, and what is found in it."""

import base64
import re
import socket
import struct
from ipaddress import IPv4Address

import pytest

from tests.borders.capture import SYN, Capture, Flow, Segment, segment_of, streams
from tests.borders.network import Machine, why_not
from tests.borders.secrets import Secrets, forms

FLOW = Flow("10.77.1.10", 40000, "10.77.2.20", 7001)
WORD = b"PATIENT-FILE long"
FRAMES = 20_000


def frame(number: int, data: bytes, flags: int = 0, flow: Flow = FLOW, padding: int = 0) -> bytes:
    """An Ethernet frame; short ones are padded on a wire."""
    tcp = struct.pack("!HHIIBBHHH", flow.source_port, flow.target_port, number, 0, 5 << 4, flags, 0, 0, 0) + data
    addresses = IPv4Address(flow.source).packed + IPv4Address(flow.target).packed
    ip = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(tcp), 0, 0, 64, 6, 0) + addresses
    return bytes(12) + struct.pack("!H", 0x0800) + ip + tcp + bytes(padding)


def parsed(*frames: bytes) -> list[Segment]:
    return [segment for each in frames if (segment := segment_of(each)) is not None]


def test_segments_are_put_together_whatever_their_order_and_however_often_they_come() -> None:
    before = (1 << 32) - 6  # numbers go round
    sent = [frame(before, b"", SYN), frame(before + 1, b"PATIE"), frame(0, b"NT-FILE", padding=6), frame(7, b" long")]
    for order in ((0, 1, 2, 3), (0, 3, 2, 1), (0, 2, 2, 1, 3)):
        assert streams(parsed(*(sent[index] for index in order))) == {FLOW: [WORD]}


def test_a_hole_divides_and_other_packets_are_none_of_tcp() -> None:
    assert streams(parsed(frame(100, b"abc"), frame(110, b"xyz"))) == {FLOW: [b"abc", b"xyz"]}
    assert segment_of(bytes(60)) is None
    assert segment_of(b"") is None


def test_a_second_connection_of_the_same_ports_is_another_stretch() -> None:
    sent = [frame(1, b"", SYN), frame(2, b"one"), frame(500, b"", SYN), frame(501, b"two")]
    assert streams(parsed(*sent)) == {FLOW: [b"one", b"two"]}


@pytest.mark.parametrize("before", [b"", b"x", b"xy"])
def test_a_secret_is_found_in_every_form(before: bytes) -> None:
    text = before + WORD + b"?"
    for written in (text, text.hex().encode(), text.hex().upper().encode(), base64.b64encode(text)):
        assert any(form in written for form in forms(WORD)), written
    secret = bytes(range(200, 232))
    assert any(form in base64.urlsafe_b64encode(before + secret) for form in forms(secret))
    assert not any(form in b"PATIENT-FILES are long" for form in forms(WORD))


def test_what_is_found_is_told_by_kind_and_place() -> None:
    secrets = Secrets()
    secrets.add("prompt", WORD, "another prompt")
    said = {FLOW: [b"...", b"{" + WORD + b"}"]}
    assert secrets.found(said) == {"prompt": 1}
    assert secrets.where(said) == ["prompt (1) from 10.77.1.10:40000 to 10.77.2.20:7001"]
    with pytest.raises(AssertionError, match="too short"):
        secrets.add("key", "1234567")


@pytest.mark.skipif(bool(REASON := why_not()), reason=REASON or "none")
def test_a_listener_that_is_behind_hears_the_rest_at_the_end() -> None:
    machine = Machine("alone", "127.0.0.1")
    try:
        with Capture(machine, "lo") as capture, machine.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            for number in range(FRAMES):
                sender.sendto(b"PATIENT-FILE %d" % number, ("127.0.0.1", 9))
    finally:
        machine.close()
    assert capture.dropped == 0
    heard = {word for each in capture.frames for word in re.findall(rb"PATIENT-FILE \d+$", each)}
    assert len(heard) == FRAMES

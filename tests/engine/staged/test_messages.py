import socket
import threading

import pytest

from engine.staged.messages import Done, Drop, Logits, SequenceChunk, receive_from_stage, receive_to_stage, send


@pytest.fixture
def peers():
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_frames_come_as_they_were_sent(peers):
    one, other = peers
    payload = bytes(range(256)) * 8192  # more than a socket holds
    sending = threading.Thread(
        target=lambda: [send(one, SequenceChunk(7, 3, is_void=True), payload), send(one, Drop(7)), one.close()]
    )
    sending.start()
    assert receive_to_stage(other) == (SequenceChunk(7, 3, is_void=True), payload)
    assert receive_to_stage(other) == (Drop(7), b"")
    assert receive_to_stage(other) is None
    sending.join()


def test_what_ends_in_the_middle_is_nothing(peers):
    one, other = peers
    one.sendall(b"\x05\x00\x00\x00" + bytes(8) + b"\x92")
    one.close()
    assert receive_from_stage(other) is None


def test_what_is_no_frame_is_refused(peers):
    one, other = peers
    one.sendall(b"\xff" * 12)
    with pytest.raises(ValueError, match="a frame of 4294967295"):
        receive_from_stage(other)
    send(one, Drop(1))  # for stages
    with pytest.raises(ValueError, match="Drop"):
        receive_from_stage(other)


def test_each_side_reads_what_the_other_says(peers):
    one, other = peers
    for message in (Done(3), Logits(4)):
        send(one, message, b"x")
        assert receive_from_stage(other) == (message, b"x")

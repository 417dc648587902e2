"""The digest of a chunk: the same in parts, bound to its place, behind the payload."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transport.helpers import deliver
from tests.transport.proxy import Forger
from transport.path.shm import parts_of
from transport.receive.server import TransferServer
from transport.send.client import ClientOptions, TransferClient
from transport.wire.checksum import DIGEST_BYTES, Digest, Integrity, digest
from transport.wire.connection import Connection, ConnectionRole
from transport.wire.frames import Chunk
from transport.wire.seal import TAG_BYTES

LARGE = [3_000_000, 0, 1, 20_480, 700_000, 5_000_000]
SEED, OFFSET = 7, 4096


@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 50))
def test_a_digest_does_not_depend_on_the_parts(blocks: list[bytes], part_bytes: int) -> None:
    whole = b"".join(blocks)
    parts = list(parts_of(map(memoryview, blocks), part_bytes))
    assert b"".join(view for part in parts for view in part) == whole
    assert [sum(map(len, part)) for part in parts[:-1]] == [part_bytes] * (len(parts) - 1)
    running = Digest(SEED, OFFSET)
    for part in parts:
        running.update(part)
    assert running.value() == digest([memoryview(whole)], SEED, OFFSET)
    assert int.from_bytes(running.trailer(), "little") == running.value()


@given(st.binary(max_size=40))
def test_a_digest_is_bound_to_transfer_and_place(data: bytes) -> None:
    view = [memoryview(data)]
    assert len({digest(view, SEED, OFFSET), digest(view, SEED + 1, OFFSET), digest(view, SEED, OFFSET + 1)}) == 3


def greeted(integrity: Integrity) -> tuple[Connection, Connection]:
    sender, receiver = (
        Connection(
            role,
            integrity=integrity,
            nonce=role.name[:1].encode() * 16,
            now=0.0,
            max_chunk_bytes=1 << 20,
            session_secret=lambda _: b"k" * 32,
        )
        for role in (ConnectionRole.SENDER, ConnectionRole.RECEIVER)
    )
    for here, there in ((sender, receiver), (receiver, sender)):
        there.receive_data(here.data_to_send(), 0.0)
        there.next_event()
    return sender, receiver


@pytest.mark.parametrize(
    ("integrity", "behind"), [(Integrity.CHECKSUM, DIGEST_BYTES), (Integrity.NONE, 0), (Integrity.AEAD, TAG_BYTES)]
)
def test_what_follows_a_payload_is_agreed_on(integrity: Integrity, behind: int) -> None:
    sender, receiver = greeted(integrity)
    assert sender.digest_behind is receiver.digest_behind is (behind == DIGEST_BYTES)
    header = sender.chunk_header(0, OFFSET, 1000, sealed=integrity is Integrity.AEAD)
    receiver.receive_data(header, 0.0)
    assert isinstance(receiver.next_event(), Chunk)
    assert receiver.payload_left == 1000 + behind


def test_a_chunk_that_does_not_fit_its_digest_is_sent_again() -> None:
    with (
        TransferServer() as server,
        Forger(server.address, [1_500_000]) as forger,
        TransferClient(options=ClientOptions(connections=1)) as client,
    ):
        delivery = deliver(server, client, LARGE, address=forger.address)
        pushed, landed = delivery.wait()
        assert pushed is not None
        assert landed is not None
        assert pushed.ok
        assert landed.rejected_chunks == server.counters["rejected:checksum"] == 1
        assert delivery.equal

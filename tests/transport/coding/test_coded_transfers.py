"""Coded chunks over real sockets: what arrives, what is refused, which end is told."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.transport.helpers import PATIENCE_S, SECRET, Memory
from tests.transport.proxy import Forger
from transport.coding.choice import (
    CodingPolicy,
    Compression,
    CpuMeter,
    FormatOf,
    Quantisation,
    QuantiseWhen,
    RangeFormat,
)
from transport.coding.codec import Codec, decodable, zstd_module
from transport.coding.elements import Run, from_floats, to_floats
from transport.control.certificates import Authority
from transport.receive.options import ServerOptions
from transport.receive.registry.landing import LandingResult
from transport.receive.server import TransferServer
from transport.send.client import ClientOptions, PushResult, TransferClient
from transport.send.lane import outlet
from transport.send.spec import TransferSpec
from transport.wire.checksum import Integrity
from transport.wire.connection import Connection, ConnectionRole, ProtocolState

pytestmark = pytest.mark.skipif(zstd_module() is None, reason="needs the zstd extra")

SLAB, STATE = 64 * 1024, 40_000
SIZES = [SLAB, SLAB, STATE] * 20
RUN = Run(SLAB, "bfloat16", 64)
ZSTD = CodingPolicy(compression=Compression.ZSTD)
AUTO = CodingPolicy(compression=Compression.AUTO)
INT8 = CodingPolicy(quantisation=Quantisation.INT8, quantise_when=QuantiseWhen.ALWAYS)
FP8_ZSTD = CodingPolicy(compression=Compression.ZSTD, quantisation=Quantisation.FP8, quantise_when=QuantiseWhen.ALWAYS)
TAKES_ALL = ServerOptions(codecs=decodable(lossy=True))


def formats(kv: CodingPolicy, state: CodingPolicy = ZSTD) -> FormatOf:
    slab = RangeFormat("full_attention", (Run(SLAB // 2, "bfloat16", 64), Run(SLAB // 2, "bfloat16", 64)), kv)
    snapshot = RangeFormat("linear_state", (Run(STATE, "float32"),), state)
    return lambda index: snapshot if index % 3 == 2 else slab


def kv_memory() -> Memory:
    memory = Memory(SIZES, seed=1, page=24 * 1024)
    rng = np.random.default_rng(3)
    for index, size in enumerate(SIZES):
        values = rng.standard_normal(size // 2).astype(np.float32)
        data, at = from_floats(values, "bfloat16").tobytes(), 0
        for view in memory(index):
            view[:] = data[at : at + len(view)]
            at += len(view)
    return memory


class Delivery:
    """One transfer of KV-like bytes."""

    def __init__(
        self,
        server: TransferServer,
        client: TransferClient,
        formats: FormatOf | None,
        *,
        exact: bool = False,
        address: str = "",
    ) -> None:
        self.source, self.target = kv_memory(), Memory(SIZES, seed=2, page=24 * 1024)
        landed, results = threading.Event(), list[LandingResult]()
        server.expect(
            "t", SECRET, SIZES, self.target, exact=exact, on_done=lambda result: (results.append(result), landed.set())
        )
        push = client.open(TransferSpec(address or server.address, "t", SECRET, SIZES, formats=formats), self.source)
        push.ready_all()
        pushed = push.wait(PATIENCE_S)
        assert landed.wait(10)
        assert pushed is not None
        self.pushed: PushResult = pushed
        self.landed = results[0]

    def equal(self, index: int) -> bool:
        return self.source.content()[index] == self.target.content()[index]

    @property
    def all_equal(self) -> bool:
        return self.source.content() == self.target.content()

    def error(self, index: int) -> float:
        """Root mean square of the relative error of a slab."""
        before, after = (
            to_floats(np.frombuffer(memory.content()[index], np.uint8).copy(), "bfloat16")
            for memory in (self.source, self.target)
        )
        return float(np.sqrt(np.mean((after - before) ** 2)) / before.std())


@pytest.fixture
def client() -> Iterator[TransferClient]:
    with TransferClient(options=ClientOptions(connections=1, chunk_bytes=300_000)) as client:
        yield client


def test_zstd_is_exact_and_saves_bytes(client: TransferClient) -> None:
    with TransferServer() as server:
        done = Delivery(server, client, formats(ZSTD), exact=True)
        assert done.pushed.ok
        assert done.all_equal
        assert done.landed.lossy_bytes == 0
        assert done.pushed.stats.bytes_saved > 0.1 * sum(SIZES)
        assert set(done.pushed.stats.bytes_by_codec) <= {"zstd", "plain"}
        (accounts,) = client.codecs().values()
        assert accounts.uses["full_attention", "zstd"].coded_bytes < accounts.uses["full_attention", "zstd"].plain_bytes
        assert accounts.cpu_s > 0
        assert server.codecs.uses["", "zstd"].plain_bytes > 0


def test_quantised_slabs_are_close_and_states_stay_exact(client: TransferClient) -> None:
    with TransferServer(options=TAKES_ALL) as server:
        done = Delivery(server, client, formats(INT8))
        assert done.pushed.ok
        assert all(done.equal(i) for i in range(2, len(SIZES), 3))
        assert 0 < done.error(0) < 0.01
        assert done.landed.lossy_bytes > 0.9 * 2 * SLAB * 20
        assert done.pushed.stats.bytes_by_codec["int8"] == done.landed.lossy_bytes


def test_quantised_and_compressed_over_a_sealed_connection(tmp_path: Path) -> None:
    identity = Authority(tmp_path).issue("node")
    mode = Integrity.AEAD
    receiving = ServerOptions(codecs=decodable(lossy=True), integrity=mode, identity=identity)
    sending = ClientOptions(connections=2, chunk_bytes=300_000, integrity=mode, identity=identity)
    with TransferServer(options=receiving) as server, TransferClient(options=sending) as client:
        done = Delivery(server, client, formats(FP8_ZSTD))
        assert done.pushed.ok
        assert 0 < done.error(0) < 0.04
        assert all(done.equal(i) for i in range(2, len(SIZES), 3))
        assert done.pushed.stats.bytes_saved > 0.4 * sum(SIZES)


def test_without_integrity_decoding_still_verifies() -> None:
    with (
        TransferServer(options=ServerOptions(integrity=Integrity.NONE)) as server,
        TransferClient(options=ClientOptions(connections=2, integrity=Integrity.NONE)) as client,
    ):
        assert Delivery(server, client, formats(ZSTD)).all_equal


def test_a_receiver_that_takes_nothing_coded_gets_plain_bytes(client: TransferClient) -> None:
    with TransferServer(options=ServerOptions(codecs=Codec.RAW)) as server:
        done = Delivery(server, client, formats(FP8_ZSTD))
        assert done.all_equal
        assert done.pushed.stats.bytes_saved == 0
        assert done.pushed.stats.rejected_chunks == 0


def test_a_receiver_that_takes_no_quantised_bytes_gets_exact_ones(client: TransferClient) -> None:
    with TransferServer() as server:
        done = Delivery(server, client, formats(FP8_ZSTD))
        assert done.all_equal
        assert "fp8" not in " ".join(done.pushed.stats.bytes_by_codec)


def test_an_exact_landing_refuses_quantised_chunks_and_gets_plain_ones(client: TransferClient) -> None:
    with TransferServer(options=TAKES_ALL) as server:
        done = Delivery(server, client, formats(INT8), exact=True)
        assert done.pushed.ok
        assert done.all_equal
        assert done.landed.lossy_bytes == 0
        assert done.landed.rejected_chunks > 0
        assert server.counters["rejected:codec"] > 0
        (accounts,) = client.codecs().values()
        assert accounts.events["refused_by_peer"] == done.pushed.stats.rejected_chunks


def test_a_chunk_that_does_not_decode_is_refused_counted_and_sent_plain(
    client: TransferClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(outlet.LaneCoder):
        def code(self, *arguments: object) -> memoryview | None:
            coded = super().code(*arguments)  # type: ignore[arg-type]
            if coded is not None:
                coded[len(coded) // 2] ^= 1  # before its checksum is taken
            return coded

    monkeypatch.setattr(outlet, "LaneCoder", Broken)
    with TransferServer() as server, TransferClient(options=ClientOptions(connections=2)) as broken:
        done = Delivery(server, broken, formats(ZSTD))
        assert done.pushed.ok
        assert done.all_equal
        assert server.counters["rejected:codec"] == done.landed.rejected_chunks > 0


def test_a_damaged_chunk_is_sent_again(client: TransferClient) -> None:
    with TransferServer() as server, Forger(server.address, [500_000, 1_500_000]) as forger:
        done = Delivery(server, client, formats(ZSTD), address=forger.address)
        assert done.all_equal
        assert server.counters["rejected:checksum"] == 2
        assert done.pushed.stats.bytes_saved > 0  # still coded


def test_auto_leaves_a_fast_link_alone(client: TransferClient) -> None:
    with TransferServer() as server:
        done = Delivery(server, client, formats(AUTO, AUTO))
        assert done.all_equal
        assert set(done.pushed.stats.bytes_by_codec) == {"plain"}


class IdleMachine(CpuMeter):
    def idle_cores(self, now: float, own_cpu_s: float) -> float:
        return 2.0


def test_auto_codes_on_a_narrow_link_with_an_idle_machine() -> None:
    options = ClientOptions(connections=2, chunk_bytes=300_000, egress_bytes_per_s=1e6)
    with TransferServer() as server, TransferClient(options=options, cpu_meter=IdleMachine) as client:
        server.expect("t", SECRET, SIZES, Memory(SIZES, page=24 * 1024))
        push = client.open(TransferSpec(server.address, "t", SECRET, SIZES, formats=formats(AUTO, AUTO)), kv_memory())
        push.ready_all()
        deadline = time.monotonic() + PATIENCE_S
        while "zstd" not in push.stats.bytes_by_codec:
            assert time.monotonic() < deadline
            assert push.wait(0.02) is None
        client.set_egress_budget(None)
        result = push.wait(PATIENCE_S)
        assert result is not None
        assert result.ok


def test_codecs_are_offered_in_the_greeting() -> None:
    sender, receiver = (
        Connection(role, integrity="xxh3", nonce=b"n" * 16, now=0.0, max_chunk_bytes=1 << 20, codecs=codecs)
        for role, codecs in ((ConnectionRole.SENDER, 0), (ConnectionRole.RECEIVER, 5))
    )
    for here, there in ((sender, receiver), (receiver, sender)):
        there.receive_data(here.data_to_send(), 0.0)
        there.next_event()
    assert sender.state is receiver.state is ProtocolState.OPEN
    assert sender.codecs == receiver.codecs == 5


def test_a_receiver_that_decodes_nothing_gets_plain_bytes(client: TransferClient) -> None:
    with TransferServer(options=ServerOptions(codecs=Codec.RAW)) as server:
        done = Delivery(server, client, formats(INT8))
        assert done.all_equal
        assert not done.pushed.stats.bytes_by_codec


def test_formats_that_fail_end_their_push_alone(client: TransferClient) -> None:
    def broken(index: int) -> RangeFormat:
        raise KeyError(index)

    with TransferServer() as server:
        server.expect("broken", SECRET, SIZES, Memory(SIZES, page=24 * 1024))
        push = client.open(TransferSpec(server.address, "broken", SECRET, SIZES, formats=broken), kv_memory())
        push.ready_all()
        result = push.wait(PATIENCE_S)
        assert result is not None
        assert (result.reason, result.detail) == ("aborted", "source: 0")
        assert Delivery(server, client, formats(ZSTD)).all_equal

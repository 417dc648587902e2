"""Bytes from strangers, in bulk: `python -m tests.transport.fuzz --inputs 1000000` (what `make fuzz` runs).

An input is what one read may bring: frames of every kind with their fields chosen at random or at the edges, then cut,
spliced and flipped; headers before noise; noise. It goes to an end that is being greeted or is open, plain or sealed.
What that end takes for a frame goes on to the registry of landings or to the scheduler of lanes, as from a driver. One in a
hundred goes to a real listener over a socket (see fuzz_inlet), one in two hundred to a real sender (see fuzz_outlet).
Allowed are frames and TransportErrors; anything else, an input that takes long, or memory that grows, fails."""

import argparse
import dataclasses
import multiprocessing
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final

from tests.transport.fuzzing.inlet import RealInlets
from tests.transport.fuzzing.inputs import SECRET, SEGMENT, SEGMENT_BYTES, SIZES, any_frame, spoil
from tests.transport.fuzzing.outlet import RealOutlets
from transport.errors import TransportError
from transport.receive.registry.landings import Landings
from transport.receive.registry.segments import RemoteSegment
from transport.send.schedule.lanes import LaneScheduler, LaneTransfer
from transport.wire import frames
from transport.wire.checksum import Integrity
from transport.wire.connection import Connection, ConnectionRole, ProtocolState
from transport.wire.encoding import encode
from transport.wire.frames import HEADER, Abort, Chunk, CodedChunk, Frame, Open
from transport.wire.manifest import Manifest, Outbox

INPUTS_PER_END: Final = 50
INPUTS_PER_REAL_LISTENER: Final = 100
INPUTS_PER_REAL_SENDER: Final = 200
SLOW_S: Final = 1.0  # of processor time, which other work on the machine does not stretch; a usual input takes 0.1 ms
MAX_GROWTH_BYTES: Final = 64 << 20
WARM_INPUTS: Final = 2000
SEGMENT_MEMORY: Final = memoryview(bytearray(SEGMENT_BYTES))  # one for all: ends are many


class End:
    """One end of a connection, with whatever stands behind it."""

    def __init__(self, rng: random.Random) -> None:
        self.role = rng.choice(list(ConnectionRole))
        self.sealed = rng.random() < 0.3
        self.connection = self._connection(self.role, b"n" * 16)
        self.greeted = rng.random() < 0.75
        if self.greeted:
            self._greet()
        self.landings = Landings()
        self.landings.connected(1)
        self.landings.segments.register(SEGMENT, RemoteSegment(SEGMENT_MEMORY, SECRET, readable=True))
        self.landings.expect("t", SECRET, SIZES, _memory, on_done=None, deadline=1e9)
        self.scheduler = LaneScheduler(chunk_bytes=1 << 16)
        self.scheduler.lane_up(1)
        self.transfer = LaneTransfer(slot=0, transfer_id="t", secret=SECRET, outbox=Outbox(Manifest(SIZES)))
        self.scheduler.add(self.transfer)
        self.scheduler.ready(self.transfer, [0, 1, 2])
        self.sink = memoryview(bytearray(1 << 17))

    def _connection(self, role: ConnectionRole, nonce: bytes) -> Connection:
        return Connection(
            role,
            integrity=Integrity.AEAD if self.sealed else Integrity.CHECKSUM,
            nonce=nonce,
            now=0.0,
            max_chunk_bytes=1 << 16,
            session=b"s" * 16,
            session_secret=lambda _: b"k" * 32,
        )

    def _greet(self) -> None:
        peer = self._connection(
            ConnectionRole.RECEIVER if self.role is ConnectionRole.SENDER else ConnectionRole.SENDER, b"m" * 16
        )
        self.peer = peer
        for _ in range(2):
            for here, there in ((peer, self.connection), (self.connection, peer)):
                if data := here.data_to_send():
                    there.receive_data(data, 0.0)
                    while there.next_event() is not None:
                        pass
        assert self.connection.state is ProtocolState.OPEN

    @property
    def next_number(self) -> int:
        """Of the frame that this end expects: fuzzing would end at the first wrong one."""
        return self.connection.frames_received

    def feed(self, data: bytes) -> int:
        """Returns the number of frames that were taken. Raises TransportError."""
        view, taken = memoryview(data), 0
        while view:
            view = view[self.connection.receive_data(view, 0.0) :]
            while True:
                while self.connection.payload_left and self.connection.payload_buffered:
                    self.connection.take_payload(self.sink)
                if self.connection.payload_left or (frame := self.connection.next_event()) is None:
                    break
                taken += 1
                assert taken <= len(data), "more frames than bytes"
                self._act_on(frame)
        self.connection.data_to_send()
        return taken

    def _act_on(self, frame: Frame) -> None:
        if self.role is ConnectionRole.SENDER:
            self.scheduler.on_frame(1, frame)
            self.scheduler.next_batch(1)
            return
        match frame:
            case Open():
                self.landings.open(1, frame, self.connection.transcript, 0.0)
            case Abort():
                self.landings.abort(1, frame, 0.0)
            case Chunk() | CodedChunk():
                claim = self.landings.begin(1, frame.slot, frame.offset, frame.stop, _sink, 0.0)
                if hasattr(claim, "views"):
                    self.landings.finish(claim, verified=False, now=0.0)
            case _:
                pass


def _memory(index: int) -> list[memoryview]:
    return [memoryview(bytearray(SIZES[index]))]


def _sink(size: int) -> memoryview:
    return memoryview(bytearray(size))


def any_input(rng: random.Random, end: End) -> bytes:
    dice = rng.random()
    if dice < 0.05:
        return rng.randbytes(rng.randrange(80))
    if dice < 0.15:
        body = rng.randbytes(rng.randrange(60))
        return HEADER.pack(rng.randrange(30), rng.randrange(2), end.next_number & 0xFFFF, len(body)) + body
    data = bytearray()
    for i in range(rng.choice((1, 1, 1, 2, 5))):
        try:
            data += encode(any_frame(rng, end), end.next_number + i)
        except (ValueError, frames.struct.error):
            continue  # not one that can be said
        if data and rng.random() < 0.15:
            data += rng.randbytes(rng.randrange(100))  # a payload, or not
    if end.greeted and end.sealed and rng.random() < 0.5:
        data = bytearray(_sealed(rng, end, bytes(data)))
    return bytes(spoil(rng, data))


def _sealed(rng: random.Random, end: End, data: bytes) -> bytes:
    """As a peer with the keys would say it."""
    peer = end.peer
    if peer.state is not ProtocolState.OPEN:
        return data
    peer.frames_sent = end.next_number
    try:
        return peer.send(any_frame(rng, end))
    except (TransportError, ValueError, frames.struct.error, AssertionError):
        return data


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What came of the inputs."""

    inputs: int
    frames: int
    refused: Counter[str]
    slowest_s: float
    growth_bytes: int
    listeners: Counter[str]  # what the real ones have counted
    senders: Counter[str]  # how the pushes of the real ones ended

    def __add__(self, other: "Report") -> "Report":
        return Report(
            self.inputs + other.inputs,
            self.frames + other.frames,
            self.refused + other.refused,
            max(self.slowest_s, other.slowest_s),
            max(self.growth_bytes, other.growth_bytes),
            self.listeners + other.listeners,
            self.senders + other.senders,
        )


def fuzz(num_inputs: int, seed: int) -> Report:
    """Raises whatever an end should not have raised; AssertionError for one that hangs or hoards."""
    with RealInlets(seed) as inlets, RealOutlets(seed) as outlets:
        return _fuzz(num_inputs, seed, inlets, outlets)


def _fuzz(num_inputs: int, seed: int, inlets: RealInlets, outlets: RealOutlets) -> Report:
    rng = random.Random(seed)
    taken, slowest_s, refused, end = 0, 0.0, Counter[str](), End(rng)
    at_first = 0
    for number in range(num_inputs):
        if number % INPUTS_PER_END == 0 or end.connection.state is ProtocolState.CLOSED:
            end = End(rng)
        if number == WARM_INPUTS:
            at_first = _peak_bytes()
        if number % INPUTS_PER_REAL_SENDER == 1:
            outlets.feed(number)
            continue
        if number % INPUTS_PER_REAL_LISTENER == 0:
            inlets.feed(number)
            continue
        data = any_input(rng, end)
        started = time.thread_time()
        try:
            now_taken = end.feed(data)
            taken += now_taken
            if not now_taken and rng.random() < 0.5:
                end = End(rng)  # a frame that was begun and not finished swallows what follows
        except TransportError as exc:
            refused[type(exc).__name__] += 1
            end = End(rng)
        except BaseException:
            print(f"seed {seed}, input {number}, {end.role.name}: {data.hex()}", file=sys.stderr)
            raise
        slowest_s = max(slowest_s, time.thread_time() - started)
        assert slowest_s < SLOW_S, f"seed {seed}, input {number} took {slowest_s:.1f} CPU s"
    growth = _peak_bytes() - at_first if at_first else 0
    assert growth < MAX_GROWTH_BYTES, f"memory grew by {growth / (1 << 20):.0f} MiB"
    return Report(num_inputs, taken, refused, slowest_s, growth, inlets.counters, outlets.ends)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.transport.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args(argv)
    started = time.monotonic()
    shares = [arguments.inputs // arguments.jobs] * arguments.jobs
    shares[0] += arguments.inputs - sum(shares)
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        reports = pool.starmap(fuzz, [(share, arguments.seed + i) for i, share in enumerate(shares)])
    total = reports[0]
    for report in reports[1:]:
        total += report
    seconds, cpu = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{total.inputs:,} inputs, {total.frames:,} frames taken, "
        + ", ".join(f"{count:,} {name}" for name, count in total.refused.most_common())
        + f"; nothing else raised, slowest input {1000 * total.slowest_s:.1f} CPU ms, "
        f"memory +{total.growth_bytes / (1 << 20):.1f} MiB; "
        f"{seconds:.0f} s, {cpu.ru_utime + cpu.ru_stime:.0f} CPU s\n"
        "real listeners: " + ", ".join(f"{count:,} {name}" for name, count in total.listeners.most_common()) + "\n"
        "pushes of real senders: " + ", ".join(f"{count:,} {name}" for name, count in total.senders.most_common())
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

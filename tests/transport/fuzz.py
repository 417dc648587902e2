"""Bytes from strangers, in bulk: `python -m tests.transport.fuzz --inputs 1000000` (what `make fuzz` runs).

An input is what one read may bring: frames of every kind with their fields chosen at random or at the edges, then cut,
spliced and flipped; headers before noise; noise. It goes to an end that is being greeted or is open, plain or sealed,
and what it takes for a frame goes on to the registry of landings or to the scheduler of lanes, as a driver would hand
it over. Allowed are frames and TransportErrors; anything else, an input that takes long, or memory that grows, fails.
"""

import argparse
import dataclasses
import multiprocessing
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from transport import frames
from transport.checksum import Integrity
from transport.connection import TRANSITIONS, Connection, Role, State
from transport.errors import TransportError
from transport.frames import HEADER, VERSION_MAX, VERSION_MIN, Abort, Chunk, CodedChunk, Frame, Open, encode
from transport.landings import Landings
from transport.lanes import LaneScheduler, Transfer
from transport.transfer import Manifest, Outbox, proof_of

SIZES: Final = (4096, 0, 70_000)
INPUTS_PER_END: Final = 50
SLOW_S: Final = 1.0  # of processor time, which other work on the machine does not stretch; a usual input takes 0.1 ms
MAX_GROWTH_BYTES: Final = 64 << 20
WARM_INPUTS: Final = 2000
EDGES: Final = {
    "B": (0, 1, 255), "H": (0, 1, 2, 3, 65535), "I": (0, 0, 0, 1, 4096, 1 << 16, (1 << 32) - 1),
    "Q": (0, 0, 0, 1, 4096, 74_096, 1 << 46, (1 << 46) + 1, (1 << 64) - 1), "?": (False, True),
}  # fmt: skip
WORDS: Final = ("", "t", "xxh3", "aes-128-gcm", "protocol", "a word nobody knows", "é" * 20, "segment:s:1", "x" * 1024)


class End:
    """One end of a connection, with whatever stands behind it."""

    def __init__(self, rng: random.Random) -> None:
        self.role = rng.choice(list(Role))
        self.sealed = rng.random() < 0.3
        self.version_max = rng.choice((VERSION_MIN, VERSION_MAX - 1, VERSION_MAX, VERSION_MAX))
        self.connection = self._connection(self.role, b"n" * 16)
        self.greeted = rng.random() < 0.75
        if self.greeted:
            self._greet()
        self.landings = Landings()
        self.landings.connected(1)
        self.landings.expect("t", b"secret", SIZES, _memory, on_done=None, deadline=1e9)
        self.scheduler = LaneScheduler(chunk_bytes=1 << 16)
        self.scheduler.lane_up(1)
        self.transfer = Transfer(slot=0, transfer_id="t", secret=b"secret", outbox=Outbox(Manifest(SIZES)))
        self.scheduler.add(self.transfer)
        self.scheduler.ready(self.transfer, [0, 1, 2])
        self.sink = memoryview(bytearray(1 << 17))

    def _connection(self, role: Role, nonce: bytes) -> Connection:
        return Connection(
            role,
            integrity=Integrity.AEAD if self.sealed else Integrity.CHECKSUM,
            nonce=nonce,
            now=0.0,
            max_chunk_bytes=1 << 16,
            session=b"s" * 16,
            session_secret=lambda _: b"k" * 32,
            version_max=self.version_max,
        )

    def _greet(self) -> None:
        peer = self._connection(Role.RECEIVER if self.role is Role.SENDER else Role.SENDER, b"m" * 16)
        self.peer = peer
        for _ in range(2):
            for here, there in ((peer, self.connection), (self.connection, peer)):
                if data := here.data_to_send():
                    there.receive_data(data, 0.0)
                    while there.next_event() is not None:
                        pass
        assert self.connection.state is State.OPEN

    @property
    def next_number(self) -> int:
        """Of the frame that this end expects: fuzzing would end at the first wrong one."""
        return self.connection._receive_seq

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
        if self.role is Role.SENDER:
            self.scheduler.on_frame(1, frame)
            self.scheduler.next_batch(1)
            return
        match frame:
            case Open():
                self.landings.open(1, frame, self.connection.nonces, 0.0)
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


def any_frame(rng: random.Random, end: End) -> Frame:
    due = list(TRANSITIONS[end.role][end.connection.state])
    kind = rng.choice(due if due and rng.random() < 0.9 else list(frames._KINDS))
    if kind is Chunk or kind is CodedChunk:
        values: dict[str, Any] = {f.name: rng.choice(EDGES["I"]) for f in dataclasses.fields(kind)}
        values["sealed"] = rng.random() < 0.5
        return kind(**values)
    values = {name: _value(rng, field) for name, field in frames._FIELDS[kind]}
    if kind is Open and rng.random() < 0.5:  # one that is let in
        manifest = Manifest(SIZES)
        values |= {
            "transfer_id": "t",
            "proof": proof_of(b"secret", "t", manifest.digest, end.connection.nonces),
            "manifest_digest": manifest.digest,
            "total_bytes": manifest.total_bytes,
        }
    return kind(**values)


def _value(rng: random.Random, field: str) -> Any:
    if field == "text":
        return rng.choice(WORDS)
    if field == "blob":
        return rng.randbytes(rng.choice((0, 16, 16, 32, 1024)))
    if field in ("pairs", "spans"):
        starts = [rng.choice(EDGES["Q"][:6]) for _ in range(rng.choice((0, 1, 1, 2, 40)))]
        return tuple((start, start + rng.choice((0, 1, 4096))) for start in starts)
    return rng.choice(EDGES[field])


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
    return bytes(_spoil(rng, data))


def _sealed(rng: random.Random, end: End, data: bytes) -> bytes:
    """As a peer with the keys would say it."""
    peer = end.peer
    if peer.state is not State.OPEN:
        return data
    peer._send_seq = end.next_number
    try:
        return peer.send(any_frame(rng, end))
    except (TransportError, ValueError, frames.struct.error, AssertionError):
        return data


def _spoil(rng: random.Random, data: bytearray) -> bytearray:
    for _ in range(rng.choice((0,) * 8 + (1, 1, 1, 2, 2, 4))):
        if not data:
            break
        at = rng.randrange(len(data))
        match rng.randrange(5):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                del data[at:]
            case 3:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 4:
                data[4:8] = rng.choice((0, 1, 24, 65536, 65537, (1 << 32) - 1)).to_bytes(4, "little")
    return data


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What came of the inputs."""

    inputs: int
    frames: int
    refused: Counter[str]
    slowest_s: float
    growth_bytes: int

    def __add__(self, other: "Report") -> "Report":
        return Report(
            self.inputs + other.inputs,
            self.frames + other.frames,
            self.refused + other.refused,
            max(self.slowest_s, other.slowest_s),
            max(self.growth_bytes, other.growth_bytes),
        )


def fuzz(num_inputs: int, seed: int) -> Report:
    """Raises whatever an end should not have raised; AssertionError for one that hangs or hoards."""
    rng = random.Random(seed)
    taken, slowest_s, refused, end = 0, 0.0, Counter[str](), End(rng)
    at_first = 0
    for number in range(num_inputs):
        if number % INPUTS_PER_END == 0 or end.connection.state is State.CLOSED:
            end = End(rng)
        if number == WARM_INPUTS:
            at_first = _peak_bytes()
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
    return Report(num_inputs, taken, refused, slowest_s, growth)


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
        f"{seconds:.0f} s, {cpu.ru_utime + cpu.ru_stime:.0f} CPU s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

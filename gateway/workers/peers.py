"""Workers of one gateway ask each other for what each keeps to itself, over a Unix socket of each.

"requests 123\n" ──►   the records after number 123, a JSON line each behind its number and a blank, until the end of the stream
"flows 123\n"    ──►   the same of flows
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, Protocol

import msgspec

from gateway.workers.shared_counters import SharedCounters

log = logging.getLogger("prfaas.gateway.siblings")

ANSWER_S: Final = 2.0  # a sibling that takes longer is left out: it hangs, or has just died
MAX_LINE_BYTES: Final = 1 << 20

Line = tuple[int, bytes]  # a record's number, and the record as JSON


class Numbered(Protocol):
    """Something that is kept, with its number."""

    @property
    def seq(self) -> int: ...


class NumberedRing(Protocol):
    """A ring of such (`RecordRing`, `Flows`)."""

    limit: int

    def since(self, seq: int) -> Iterable[Numbered]: ...


def lines_of(records: NumberedRing, seq: int) -> list[Line]:
    """Records after number `seq`, as they are handed out."""
    return [(record.seq, msgspec.json.encode(record)) for record in records.since(seq)]


class WorkerPeers:
    """The other workers, and this one's answers to them."""

    def __init__(self, directory: Path, number: int, board: SharedCounters, kept: Mapping[str, NumberedRing]) -> None:
        """`kept` are the rings of this worker, by the word that asks for them."""
        self._directory = directory
        self._number = number
        self._board = board
        self._kept = kept
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Answers from now on. Raises OSError."""
        path = self._path(self._number)
        path.unlink(missing_ok=True)  # of one that died in this place
        self._server = await asyncio.start_unix_server(self._answer, path)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def last_seq(self) -> int:
        """Every worker that was given a number up to here has kept its record before it answers."""
        return self._board.last_seq()

    async def lines(self, what: str, seq: int, last: int) -> tuple[list[Line], int]:
        """What all workers keep of that after number `seq`, up to `last`, which is a `last_seq`; and how many did not answer.

        None is left out that comes before another one: a reader that next asks for what follows misses nothing.
        """
        others = [number for number in range(self._board.workers) if number != self._number]
        answers = await asyncio.gather(
            *(self._ask(number, what, seq) for number in others if self._board.state(number))
        )
        lines = lines_of(self._kept[what], seq)
        for answer in answers:
            lines += answer or ()
        kept = sorted(line for line in lines if line[0] <= last)
        return kept[-self._kept[what].limit :], answers.count(None)

    async def _ask(self, number: int, what: str, seq: int) -> list[Line] | None:
        try:
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(self._path(number), limit=MAX_LINE_BYTES)
                try:
                    writer.write(b"%s %d\n" % (what.encode(), seq))
                    return [_line(each) async for each in reader]
                finally:
                    writer.close()
        except (OSError, ValueError, TimeoutError) as error:
            log.warning("worker %d does not send its records: %r", number, error)
            return None

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                what, _, number = (await reader.readline()).decode("ascii").partition(" ")
                for seq, line in lines_of(self._kept[what], int(number)):
                    writer.write(b"%d %s\n" % (seq, line))
                    await writer.drain()
        except (OSError, ValueError, KeyError, TimeoutError) as error:
            log.warning("a sibling did not get the records it asked for: %r", error)
        finally:
            writer.close()

    def _path(self, number: int) -> Path:
        return self._directory / f"worker-{number}"


def _line(each: bytes) -> Line:
    seq, _, line = each.rstrip(b"\n").partition(b" ")
    return int(seq), line

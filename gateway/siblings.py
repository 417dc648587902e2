"""Workers of one gateway ask each other for what each keeps to itself: records, over a Unix socket of each.

GET "123\n" ──►   the records after number 123, a JSON line each behind its number and a blank, until the end of the stream
"""

import asyncio
import logging
from pathlib import Path
from typing import Final

import msgspec

from gateway.board import Board
from gateway.records import Records

log = logging.getLogger("prfaas.gateway.siblings")

ANSWER_S: Final = 2.0  # a sibling that takes longer is left out: it hangs, or has just died
MAX_LINE_BYTES: Final = 1 << 20

Line = tuple[int, bytes]  # a record's number, and the record as JSON


def lines_of(records: Records, seq: int) -> list[Line]:
    """Records after number `seq`, as they are handed out."""
    return [(record.seq, msgspec.json.encode(record)) for record in records.since(seq)]


class Siblings:
    """The other workers, and this one's answers to them."""

    def __init__(self, directory: Path, number: int, board: Board, records: Records) -> None:
        self._directory = directory
        self._number = number
        self._board = board
        self._records = records
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Answers from now on. Raises OSError."""
        path = self._path(self._number)
        path.unlink(missing_ok=True)  # of one that died in this place
        self._server = await asyncio.start_unix_server(self._answer, path)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def records(self, seq: int) -> tuple[list[Line], int]:
        """Records after number `seq` of all workers, as many as one keeps; and how many workers did not answer.

        None is left out that comes before another one: whoever asks next for what follows misses nothing.
        """
        last = self._board.last_seq()  # who has been given a number up to here has kept the record before he answers
        others = [number for number in range(self._board.workers) if number != self._number]
        answers = await asyncio.gather(*(self._ask(number, seq) for number in others if self._board.state(number)))
        lines = lines_of(self._records, seq)
        for answer in answers:
            lines += answer or ()
        kept = sorted(line for line in lines if line[0] <= last)
        return kept[-self._records.limit :], answers.count(None)

    async def _ask(self, number: int, seq: int) -> list[Line] | None:
        try:
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(self._path(number), limit=MAX_LINE_BYTES)
                try:
                    writer.write(b"%d\n" % seq)
                    return [_line(each) async for each in reader]
                finally:
                    writer.close()
        except (OSError, ValueError, TimeoutError) as error:
            log.warning("worker %d does not say what it has served: %r", number, error)
            return None

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                asked = await reader.readline()
                for seq, line in lines_of(self._records, int(asked)):
                    writer.write(b"%d %s\n" % (seq, line))
                    await writer.drain()
        except (OSError, ValueError, TimeoutError) as error:
            log.warning("a sibling did not get the records it asked for: %r", error)
        finally:
            writer.close()

    def _path(self, number: int) -> Path:
        return self._directory / f"worker-{number}"


def _line(each: bytes) -> Line:
    seq, _, line = each.rstrip(b"\n").partition(b" ")
    return int(seq), line

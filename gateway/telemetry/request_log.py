"""Every finished request as a line of JSON in files that stay: what capacity planners fit and replay.

A line is the request's record, with the time of its arrival and names of its prompt's blocks. By those `prfaas-plan`
sees what prompts have in common. Nothing of what anybody wrote is in it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final

import msgspec

from gateway.config.request_log import RequestLogConfig
from gateway.request.request import Request, RequestRecord
from gateway.telemetry.line_files import INTERVAL_S, LineFiles, new_file

BLOCK_TOKENS: Final = 512  # of the blocks that a line names, as in Mooncake's traces; larger where the model's are
NAME_BITS: Final = 53  # of a block's hash: whatever reads JSON holds them exactly
PREFIX: Final = "requests"
PATTERN: Final = f"{PREFIX}-*.jsonl"


@dataclass(frozen=True, slots=True)
class LogEntry:
    """What a line is made of, off the hot path. `block_size` is that of `hashes`, in tokens."""

    record: RequestRecord
    unix_s: float
    hashes: list[bytes]
    digest: bytes
    block_size: int


class LogLine(RequestRecord, frozen=True, kw_only=True):
    """A record as it is written. `hash_ids` names full blocks of `block_tokens` tokens, and then what is left of the prompt."""

    unix_s: float
    block_tokens: int
    hash_ids: list[int]


def line_of(entry: LogEntry) -> bytes:
    """One line of JSON, with its end."""
    stride = max(1, BLOCK_TOKENS // entry.block_size)
    block_tokens = stride * entry.block_size
    # Hashes are chained: that of a block says what all before it hold. They are those of the first N−1 tokens.
    ids = [_name(each) for each in entry.hashes[stride - 1 :: stride]]
    if len(ids) * block_tokens < entry.record.total:
        ids.append(_name(entry.digest))
    record = {name: getattr(entry.record, name) for name in entry.record.__struct_fields__}
    line = LogLine(**record, unix_s=round(entry.unix_s, 6), block_tokens=block_tokens, hash_ids=ids)
    return msgspec.json.encode(line) + b"\n"


def _name(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big") >> (64 - NAME_BITS)


class RequestLog:
    """Writes a line of each request that has ended. What cannot be written is lost, and counted by `on_lost`."""

    def __init__(
        self,
        config: RequestLogConfig,
        on_lost: Callable[[str, int], None],
        *,
        interval_s: float = INTERVAL_S,
        new_file: Callable[[Path, str], FileIO] = new_file,
    ) -> None:
        """Raises OSError where files cannot be made."""
        assert config.directory is not None
        self._files = LineFiles(
            config.directory, PREFIX, config.max_bytes, line_of, on_lost, interval_s=interval_s, new_file=new_file
        )

    def ended(self, request: Request, record: RequestRecord, arrived_unix_s: float) -> None:
        """Takes the line of a request that is over. Costs an append."""
        prompt, model = request.asked, request.model
        block_size = model.hashing.block_size if model is not None else BLOCK_TOKENS
        self._files.put(LogEntry(record, arrived_unix_s, prompt.hashes, prompt.digest, block_size))

    def close(self) -> None:
        """Writes what waits, for as long as a stop may take."""
        self._files.close()

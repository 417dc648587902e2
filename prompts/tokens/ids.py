"""A prompt of token ids, from JSON to an array, in pieces: one list of them would hold the interpreter's lock for long."""

from typing import Final

import msgspec
import numpy as np

from prompts.chat.form import invalid
from prompts.tokens.segments import TokenArray, token_array

PIECE_BYTES: Final = 32 * 1024  # at most as many half ids: 0.5 ms
_LIST: Final = msgspec.json.Decoder(list[int])
_MARKS: Final = b"0123456789, \t\r\n"
_MAY_BE: Final = np.isin(np.arange(256), np.frombuffer(_MARKS, np.uint8))


def flat_ids(raw: bytes, *, piece_bytes: int = PIECE_BYTES) -> TokenArray | None:
    """The ids of a list, or of a list of one list; None for JSON that is anything else. Raises BadPrompt."""
    inner = _inside(_inside(raw.strip()) or b"")
    numbers = _inside(raw.strip()) if inner is None else inner
    if not numbers or not _MAY_BE[np.frombuffer(numbers, np.uint8)].all():
        return None
    pieces, start = list[TokenArray](), 0
    while start <= len(numbers):
        comma = numbers.find(b",", start + piece_bytes)
        end = len(numbers) if comma < 0 else comma
        pieces.append(_ids(numbers[start:end]))
        start = end + 1
    return np.concatenate(pieces)


def may_be_ids(body: bytes, others: int) -> bool:
    """Whether `body` is made of numbers, but for so many bytes at most."""
    return int(np.count_nonzero(~_MAY_BE[np.frombuffer(body, np.uint8)])) <= others


def _inside(raw: bytes) -> bytes | None:
    return raw[1:-1].strip() if raw.startswith(b"[") and raw.endswith(b"]") else None


def _ids(numbers: bytes) -> TokenArray:
    try:
        ids = _LIST.decode(b"[%b]" % numbers)
        if not ids:
            raise invalid("prompt", "a comma stands where a token id should")
        return token_array(ids)
    except msgspec.DecodeError as error:
        raise invalid("prompt", "token ids must be integers in [0, 2**32)") from error
    except OverflowError as error:
        raise invalid("prompt", "token ids must be in [0, 2**32)") from error

"""The ways in which vocabularies spell bytes that are no text: GPT-2's alphabet of 256 characters, or SentencePiece's
`<0xF0>`."""

import re
from typing import Final

_PRINTED: Final = (*range(33, 127), *range(161, 173), *range(174, 256))  # bytes that stand for themselves
_OTHERS: Final = tuple(byte for byte in range(256) if byte not in _PRINTED)
_BYTE_OF: Final = {chr(byte): byte for byte in _PRINTED} | {chr(256 + at): byte for at, byte in enumerate(_OTHERS)}
_FALLBACK: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def bytes_spelled(token: str) -> bytes | None:
    """The bytes that a vocabulary's entry stands for; None where it spells none."""
    if found := _FALLBACK.fullmatch(token):
        return bytes([int(found[1], 16)])
    try:
        return bytes(_BYTE_OF[char] for char in token)
    except KeyError:
        return None

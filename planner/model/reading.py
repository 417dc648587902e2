"""Reads files and arguments: text in plain or compressed files, and numbers with a range and a unit.

    trace day.jsonl, row 6: input_length = nan: must be a number of tokens, 0 to 1000000000

Errors inside are SettingsErrors; `named` puts what is read and where before them, and makes an InputError of them.
"""

import csv
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from planner.errors import InputError
from transport.control.settings import SettingsError, mapped, require, require_table

LEAST: Final = 1e-12  # of any number that is not 0, in its unit
BLOCK_BYTES: Final = 1 << 16
_GZIP: Final = b"\x1f\x8b"
_XZ: Final = b"\xfd7zXZ\x00"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True, slots=True)
class Range:
    """The range of a number: [low, high], in a unit."""

    low: float
    high: float
    unit: str = ""
    is_whole: bool = False

    def __str__(self) -> str:
        kind = "a whole number" if self.is_whole else "a number"
        return f"{kind}{f' of {self.unit}' if self.unit else ''}, {self.low:.10g} to {self.high:.10g}"

    def of(self, name: str, value: Any) -> float:
        """`value`, if it is such a number. Raises SettingsError."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        fits = is_number and self.low <= value <= self.high and not (self.is_whole and value != int(value))
        if not fits:  # messages are made when they are needed: traces have millions of numbers
            require(False, name, value, str(self))
        if value and abs(value) < LEAST:
            require(False, name, value, f"0, or at least {LEAST:g}: what is divided by it overflows")
        return float(value)

    def above_low(self, name: str, value: Any) -> float:
        """The same without `low` itself. Raises SettingsError."""
        require(self.of(name, value) > self.low, name, value, f"above {self.low:g}")
        return float(value)

    def of_text(self, name: str, text: Any) -> float:
        """The number that `text` spells. Raises SettingsError."""
        try:
            value = float(text)
        except (TypeError, ValueError):
            value = text
        return self.of(name, value)


TOKENS: Final = Range(0, 1e9, "tokens")
SECONDS: Final = Range(0, 1e10, "seconds")
GBPS: Final = Range(0, 1e6, "Gbit/s")
RATE: Final = Range(0, 1e9, "requests per second")
SHARE: Final = Range(0, 1)


def number(row: Mapping[str, Any], key: str, allowed: Range) -> float:
    """A field of `row`. Raises SettingsError for one that is missing, or outside what is `allowed`."""
    return allowed.of(key, _field(row, key))


def spelled_number(row: Mapping[str, Any], key: str, allowed: Range) -> float:
    """The same of a row in which everything is text, as in CSV."""
    return allowed.of_text(key, _field(row, key))


def _field(row: Mapping[str, Any], key: str) -> Any:
    if key not in row:
        raise SettingsError(f"missing: {key}")
    return row[key]


@contextmanager
def named(what: str) -> Iterator[None]:
    """Errors inside say first `what` is read, and leave as InputErrors."""
    try:
        yield
    except InputError as exc:
        raise InputError(f"{what}: {exc}") from exc
    except FileNotFoundError as exc:
        raise InputError(f"{what}: no such file") from exc
    except OSError as exc:
        raise InputError(f"{what}: {exc.strerror or exc}") from exc
    except (SettingsError, UnicodeDecodeError) as exc:
        raise InputError(f"{what}: {exc}") from exc
    except RecursionError as exc:
        raise InputError(f"{what}: nested too deeply") from exc


@contextmanager
def placed(place: str) -> Iterator[None]:
    """SettingsErrors inside say first at which `place` of a file it is."""
    with mapped(lambda text: SettingsError(f"{place}: {text}")):
        yield


def read_text(path: Path) -> str:
    """All of a text file, plain or compressed. Raises SettingsError or OSError."""
    with open_text(path) as text:
        return text.read()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises SettingsError or OSError."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except ValueError as exc:  # a JSONDecodeError, or that of an integer of thousands of digits
        raise SettingsError(f"not JSON: {exc}") from exc
    require(isinstance(value, dict), "the file", value, "an object")
    return dict(value)


def read_columns(path: Path, columns: Mapping[str, Range]) -> list[tuple[float, ...]]:
    """The numbers in these columns of a CSV file, row by row, at least one. Raises SettingsError or OSError."""
    rows = []
    with open_text(path) as text:
        try:
            for at, row in enumerate(csv.DictReader(text), 1):
                with placed(f"row {at}"):
                    rows.append(tuple(spelled_number(row, key, allowed) for key, allowed in columns.items()))
        except csv.Error as exc:
            raise SettingsError(f"not CSV: {exc}") from exc
    require(bool(rows), "rows", 0, f"at least one, with columns {' and '.join(columns)}")
    return rows


def json_rows(text: Iterable[str], is_growing: bool = False, first: int = 1) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file that has one on each line, with the numbers of their lines from `first` on. Raises SettingsError.

    `is_growing`: a writer may still be at its last line, which counts once it is whole.
    """
    for line_number, line in enumerate(text, first):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as exc:
            if is_growing and not line.endswith("\n"):
                return
            raise SettingsError(f"line {line_number}: not JSON ({exc})") from exc
        yield line_number, require_table(row, f"row {line_number}")


def open_text(path: Path) -> io.TextIOWrapper:
    """A text file in UTF-8, with any compression and any name. Reading raises SettingsError or OSError."""
    return io.TextIOWrapper(io.BufferedReader(_Unpacked(path)), encoding="utf-8-sig")


class _Unpacked(io.RawIOBase):
    """The bytes of a file, unpacked."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("rb")
        self._blocks = _unpacked(self._file)
        self._held = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._held:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._held = memoryview(block)
        size = min(len(buffer), len(self._held))
        buffer[:size] = self._held[:size]
        self._held = self._held[size:]
        return size

    def close(self) -> None:
        self._file.close()
        super().close()


def _unpacked(file: io.BufferedReader) -> Iterator[bytes]:
    begin = file.read(BLOCK_BYTES)
    blocks = iter(lambda: file.read(BLOCK_BYTES), b"")
    for magic, name, unpacker in ((_GZIP, "gzip", _gzip), (_XZ, "xz", lzma.LZMADecompressor), (_ZSTD, "zstd", _zstd)):
        if begin.startswith(magic):
            yield from _members(begin, blocks, name, unpacker)
            return
    yield begin
    yield from blocks


def _members(begin: bytes, blocks: Iterator[bytes], name: str, new: Callable[[], Any]) -> Iterator[bytes]:
    """The contents of a compressed file, which may have several parts, one behind the other."""
    unpacker, block = new(), begin
    while block:
        try:
            yield unpacker.decompress(block)
        except Exception as exc:  # zlib's, lzma's and zstandard's have nothing in common
            raise SettingsError(f"damaged {name}: {exc}") from exc
        rest = unpacker.unused_data if unpacker.eof else b""
        block = rest or next(blocks, b"")
        if block and unpacker.eof:
            unpacker = new()
    if not unpacker.eof:
        raise SettingsError(f"the file ends before its {name} does")


def _gzip() -> Any:
    return zlib.decompressobj(wbits=31)


def _zstd() -> Any:
    try:
        import zstandard
    except ImportError as exc:
        raise SettingsError("reading zstd needs the zstd extra (pip install 'prfaas[zstd]')") from exc
    return zstandard.ZstdDecompressor().decompressobj()

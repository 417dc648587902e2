"""Reads a TOML table as a frozen dataclass: for every file of this system, with one wording of errors.

    [node]: unknown key 'cache_byte' (did you mean 'cache_bytes'?); known are block_size, cache_bytes, ...
    [node]: port = '80': must be an integer
    clusters[0].nodes[1]: role = 'both': must be 'prefill' or 'decode'

A class declares its keys as fields: names, types and defaults are said there and nowhere else. Its `__post_init__`
checks values, with `require` and the like, which know the name of a key and not where its table stands; `build` puts
that before it, and `in_file` the name of the file. Errors are SettingsError here; each package maps them to its own
error at its edge.

A field has one of these types: str; int; float; bool; Path, relative to the folder of the file; Any; a StrEnum. A
WrittenPath is relative to the folder that systemd gives a unit to write in (`durable.state_path`), else as a Path. It may
be a datetime: a date is its first moment, one without a time zone is in UTC, and a string is parsed. It may
be another such class (a table), or a tuple of any of these (an array). It may be a Mapping from str to such a class
(tables by name), or to Any (a table that its reader parses). It may be a union of them.
"""

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields, is_dataclass
from datetime import UTC, date, datetime, time
from difflib import get_close_matches
from enum import StrEnum
from math import isfinite, isnan
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

from transport.control.durable import state_path
from transport.control.secret_files import located

T = TypeVar("T")

WrittenPath = Annotated[Path, "written"]  # by the process: under systemd the folder of settings files is read-only

MAX_SHOWN: Final = 80  # characters of a value in a message
MAX_FILE_BYTES: Final = 1 << 20  # of a settings file; a fleet of a thousand nodes needs less
# What TOML may give for a plain type, and how messages call it. TOML's booleans are Python's integers, ours are not.
_PLAIN: Final[dict[Any, tuple[tuple[type, ...], str]]] = {
    str: ((str,), "a string"),
    int: ((int,), "an integer"),
    float: ((int, float), "a number"),
    bool: ((bool,), "true or false"),
    Path: ((str,), "a path"),
    datetime: ((date, str), "a date, such as 2027-01-31 or 2027-01-31T12:00:00Z"),  # a datetime is a date, too
    Mapping: ((dict,), "a table"),
}


class SettingsError(ValueError):
    """An unknown key, or an impossible value. The message names both, and what is allowed."""


def read_toml(path: Path) -> dict[str, Any]:
    """The document in a file. Raises SettingsError."""
    try:
        with path.open("rb") as file:
            said = file.read(MAX_FILE_BYTES + 1)  # not what it says it has: a pipe or a device says nothing
    except FileNotFoundError as exc:
        raise SettingsError("no such file") from exc
    except OSError as exc:
        raise SettingsError(exc.strerror or str(exc)) from exc
    if len(said) > MAX_FILE_BYTES:
        raise SettingsError(f"longer than {MAX_FILE_BYTES} bytes, too long for a settings file")
    return parse_toml(said)


def parse_toml(said: bytes) -> dict[str, Any]:
    """The document that a text is. Raises SettingsError."""
    try:
        return tomllib.loads(said.decode("utf-8"))
    except RecursionError as exc:
        raise SettingsError("not valid TOML: nested too deeply") from exc
    except ValueError as exc:  # also of text that is no UTF-8, and of integers of thousands of digits
        raise SettingsError(f"not valid TOML: {exc}") from exc


@contextmanager
def in_file(path: Path, error: Callable[[str], Exception] = SettingsError) -> Iterator[None]:
    """Adds the file's name to SettingsErrors inside, and raises them as the caller's `error`."""
    with mapped(lambda text: error(f"{path}: {text}")):
        yield


@contextmanager
def mapped(error: Callable[[str], Exception]) -> Iterator[None]:
    """Raises SettingsErrors inside as another error type, with the same words."""
    try:
        yield
    except SettingsError as exc:
        raise error(str(exc)) from exc


@contextmanager
def _at(where: str) -> Iterator[None]:
    with mapped(lambda text: SettingsError(f"{where}: {text}" if where else text)):
        yield


def build(cls: type[T], table: Any, where: str, base: Path = Path()) -> T:
    """The instance of `cls` that a table stands for. `where` is the table's place, as a message says it (`[node]`,
    `clusters[0]`); relative paths are relative to `base`. Raises SettingsError.
    """
    table = require_table(table, where)
    declared: dict[str, Field[Any]] = {each.name: each for each in fields(cls)}  # type: ignore[arg-type]
    require_known(table, declared, where)
    missing = [name for name, each in declared.items() if name not in table and _is_needed(each)]
    with _at(where):
        if missing:
            raise SettingsError(f"missing: {', '.join(missing)}")
    types = get_type_hints(cls, include_extras=True)
    values = {key: _typed(types[key], value, where, key, base) for key, value in table.items()}
    with _at(where):
        return cls(**values)


def require_table(value: Any, where: str) -> dict[str, Any]:
    """`value`, if it is a table. Raises SettingsError."""
    if not isinstance(value, dict):
        raise SettingsError(f"{where} = {shown(value)}: must be a table")
    return value


def require_tables(value: Any, where: str) -> list[dict[str, Any]]:
    """`value`, if it is an array of tables. Raises SettingsError."""
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise SettingsError(f"{where} = {shown(value)}: must be an array of tables")
    return value


def require_known(table: Mapping[str, Any], known: Iterable[str], where: str = "") -> None:
    """Every key of `table` is one of `known`. Raises SettingsError that says which one was probably meant."""
    known = sorted(known)
    with _at(where):
        for key in table:
            if key not in known:
                near = get_close_matches(str(key), known, n=1)
                meant = f" (did you mean {near[0]!r}?)" if near else ""
                raise SettingsError(f"unknown key {key!r}{meant}; known are {', '.join(known)}")


def require(holds: bool, name: str, value: object, allowed: str) -> None:
    """Raises SettingsError, unless it holds: `name = value: must be allowed`."""
    if not holds:
        raise SettingsError(f"{name} = {shown(value)}: must be {allowed}")


def require_one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raises SettingsError for a word that is not allowed."""
    *others, last = map(repr, allowed)
    require(value in allowed, name, value, f"{', '.join(others)} or {last}" if others else last)


def require_range(name: str, value: float, low: float, high: float) -> None:
    """Raises SettingsError for a number outside [low, high], and for what is no number at all."""
    require(low <= value <= high, name, value, f"{low} to {high}")


def shown(value: object) -> str:
    """A value as messages show it: not at any length."""
    text = "NaN" if isinstance(value, float) and isnan(value) else repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def _is_needed(each: "Field[Any]") -> bool:
    return each.init and each.default is MISSING and each.default_factory is MISSING


def _typed(kind: Any, value: Any, where: str, key: str, base: Path) -> Any:
    """Converts `value` to a field's type `kind`."""
    if kind is Any:
        return value
    if kind == WrittenPath:
        found = _typed(Path, value, where, key, base)
        return state_path(base, value) if found == base / value else found
    if get_origin(kind) in (Union, UnionType):
        return _of_union(kind, value, where, key, base)
    if isinstance(kind, type) and is_dataclass(kind):
        return build(kind, value, _inside(where, key), base)
    if get_origin(kind) is tuple:
        return _of_array(get_args(kind)[0], value, where, key, base)
    if get_origin(kind) is Mapping and isinstance(named := get_args(kind)[1], type) and is_dataclass(named):
        tables = require_table(value, _inside(where, key))
        return {name: build(named, each, _inside(_inside(where, key), name), base) for name, each in tables.items()}
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        with _at(where):
            require_one_of(key, value, [str(member) for member in kind])
        return kind(value)
    accepted, name = _PLAIN[get_origin(kind) or kind]
    with _at(where):
        require(isinstance(value, accepted) and (type(value) is not bool or kind is bool), key, value, name)
    if kind is Path:
        with _at(where):
            try:
                return located(base, value)
            except ValueError as exc:
                raise SettingsError(f"{key} = {shown(value)}: {exc}") from exc
    if kind is datetime:
        with _at(where):
            return _moment(key, value, name)
    if kind is not float:
        return value
    with _at(where):
        require(_is_finite(value), key, value, "a finite number")
    return float(value)


def _moment(key: str, value: date | str, name: str) -> datetime:
    """The moment that a date means: the first one of a day, in UTC where it says nothing else. Raises SettingsError."""
    try:
        told = datetime.fromisoformat(value) if isinstance(value, str) else value
    except ValueError as exc:
        raise SettingsError(f"{key} = {shown(value)}: must be {name}") from exc
    moment = told if isinstance(told, datetime) else datetime.combine(told, time())
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _is_finite(value: float) -> bool:
    try:
        return isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


def _of_union(kind: Any, value: Any, where: str, key: str, base: Path) -> Any:
    """The first member that takes the value. (None stands for a key that is not there; TOML has no such value.)"""
    members = [member for member in get_args(kind) if member is not NoneType]
    if len(members) == 1:
        return _typed(members[0], value, where, key, base)
    for member in members:
        try:
            return _typed(member, value, where, key, base)
        except SettingsError:
            continue
    names = " or ".join(_PLAIN[get_origin(member) or member][1] for member in members)
    with _at(where):
        raise SettingsError(f"{key} = {shown(value)}: must be {names}")


def _of_array(kind: Any, value: Any, where: str, key: str, base: Path) -> tuple[Any, ...]:
    with _at(where):
        require(isinstance(value, list), key, value, "an array")
    return tuple(_typed(kind, each, where, f"{key}[{index}]", base) for index, each in enumerate(value))


def _inside(where: str, key: str) -> str:
    """`key` of a table, as a place of its own: [gateway] and timeouts are [gateway.timeouts]."""
    if where.startswith("["):
        return f"{where.removesuffix(']')}.{key}]"
    if where:
        return f"{where}.{key}"
    return key if key.endswith("]") else f"[{key}]"

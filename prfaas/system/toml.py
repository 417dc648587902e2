"""Writes the small TOML files that processes are started with (the standard library only reads TOML)."""

import json
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any


def dump_toml(document: Mapping[str, Any]) -> str:
    """Tables, arrays of tables and plain values as TOML text. Raises TypeError for anything else."""
    return "\n".join(_table(document, "")) + "\n"


def _table(table: Mapping[str, Any], path: str) -> Iterator[str]:
    nested = {key: value for key, value in table.items() if isinstance(value, Mapping) or _is_array_of_tables(value)}
    for key, value in table.items():
        if key not in nested:
            yield f"{_key(key)} = {_value(value)}"
    for key, value in nested.items():
        name = f"{path}.{_key(key)}" if path else _key(key)
        for entry in [value] if isinstance(value, Mapping) else value:
            yield ""
            yield f"[{name}]" if isinstance(value, Mapping) else f"[[{name}]]"
            yield from _table(entry, name)


def _is_array_of_tables(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else json.dumps(key)


def _value(value: Any) -> str:
    # JSON's strings, numbers and booleans are TOML's; \/ and surrogates are not produced by json.dumps here.
    if isinstance(value, float) and not isfinite(value):
        return str(value)  # inf and nan, as TOML has them, too
    if isinstance(value, (str, bool, int, float)):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    raise TypeError(f"{type(value).__name__} has no place in a TOML file")

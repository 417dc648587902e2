"""What engines say beforehand that they do nothing about: refused here, before a decode node makes room for the request."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

import msgspec
from msgspec import Raw

from gateway.api.openai import NOT_JSON
from gateway.errors import BadRequest

MAX_HARMLESS_BYTES: Final = 256  # of a value as JSON; a longer one asks for something

_FIELDS: Final = msgspec.json.Decoder(dict[str, list[Any]])


@dataclass(frozen=True, slots=True)
class UnsupportedFields:
    """Fields that no engine does anything about, each with the values that ask for nothing."""

    harmless: Mapping[str, Collection[Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, descriptions: Iterable[str]) -> Self:
        """What all engines have in common; one that says nothing does everything."""
        each = [_described(text) for text in descriptions]
        common = set.intersection(*(set(fields) for fields in each)) if each else set()
        return cls({name: [value for fields in each for value in fields[name]] for name in common})

    def check(self, fields: Mapping[str, Raw]) -> None:
        """Raises BadRequest for a field that engines would refuse."""
        harmless = self.harmless
        for name in fields:
            if name in harmless and _value(fields[name]) not in harmless[name]:
                raise BadRequest(
                    f"{name}: not supported by the engines of this model.", param=name, code="unsupported_parameter"
                )


def _described(text: str) -> dict[str, list[Any]]:
    try:
        return _FIELDS.decode(text or "{}")
    except NOT_JSON:
        return {}


def _value(raw: Raw) -> Any:
    """What a field says, without what is null in it; its bytes if it is long. Raises BadRequest."""
    data = bytes(raw)
    if len(data) > MAX_HARMLESS_BYTES:
        return data
    try:
        value = msgspec.json.decode(data)
    except NOT_JSON as error:
        raise BadRequest(f"The body is not valid JSON: {error}", code="invalid_json") from error
    return {name: each for name, each in value.items() if each is not None} if isinstance(value, dict) else value

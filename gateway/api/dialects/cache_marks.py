"""Marks of where a prefix of the prompt ends, as a chat says them: what becomes one text has them at characters of it."""

from collections.abc import Collection
from typing import Any

from gateway.api.cache_control import CONTROL, MARK, MAX_MARKS, Ttl
from gateway.errors import BadRequest


def marked(ttl: Ttl | None, field: str) -> dict[str, Any]:
    """What a part of a chat's message, or a message, says for a mark; an error calls it `field`."""
    mark = {"mode": "explicit", "said": field}
    return {MARK: mark if ttl is None else mark | {"ttl": ttl}}


def check_number(controls: int) -> None:
    """Raises BadRequest for more marks than Anthropic allows in one request."""
    if controls > MAX_MARKS:
        what = f"{controls} blocks are marked, {MAX_MARKS} may be"
        raise BadRequest(f"Invalid value for '{CONTROL}': {what}.", param=CONTROL, code="invalid_value")


def check_not_twice(names: Collection[str]) -> None:
    """Raises BadRequest for fields of a chat that a client sets, though the dialect says the same by fields of its own."""
    for name in sorted(names):
        what = "a field of this endpoint says the same"
        raise BadRequest(f"'{name}' is not supported here: {what}.", param=name, code="unsupported")


def content_of(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of a message with these parts: one text where all are, with the marks that were in it beside it."""
    if not all(part["type"] == "text" for part in parts):
        return {"content": parts}
    text = "".join(part["text"] for part in parts)
    length, marks = 0, []
    for part in parts:
        length += len(part["text"])
        if MARK in part:
            marks.append(part[MARK] | ({"end": length} if 0 < length < len(text) else {}))
    return {"content": text} | ({MARK: marks} if marks else {})


def also_marked(message: dict[str, Any], mark: dict[str, Any]) -> None:
    """Marks the end of a message, whatever else is marked in it."""
    if mark:
        message[MARK] = [*message.get(MARK, ()), mark[MARK]]

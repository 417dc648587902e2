"""Which model a body asks for, before it is known how that model's prompts are read.

Most clients write `model` first; then a look at the first bytes is enough. A key that comes twice counts as its reader has it:
a body that is read for another model than it names is refused there.
"""

import re
from typing import Final

import msgspec

from gateway.api.openai import NOT_JSON

FIRST: Final = re.compile(rb'\s*\{\s*"model"\s*:\s*"([^"\\\x00-\x1f]{1,256})"')


class _Named(msgspec.Struct):
    model: str | None = None


_NAMED: Final = msgspec.json.Decoder(_Named)


def model_at_begin(body: bytes) -> str | None:
    """The model that `body` names in its first field; None where that is another one."""
    found = FIRST.match(body)
    if found is None:
        return None
    try:
        return found[1].decode()
    except UnicodeDecodeError:
        return None


def model_in(body: bytes) -> str | None:
    """The model that `body` names; None without one, and where its reader will say what is wrong."""
    try:
        return _NAMED.decode(body).model
    except NOT_JSON:  # a ValidationError, too
        return None

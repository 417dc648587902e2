"""What kind of request a call is: the fields that it sets, what kind of value they have, how long its prompt is."""

import re
from typing import Final, NamedTuple

from gateway.openai import Call, Endpoint

# They say whose a request is or what it is about, not what an engine is to do.
CONTENTS: Final = frozenset(
    {
        "model",
        "messages",
        "prompt",
        "user",
        "metadata",
        "cache_salt",
        "prompt_cache_key",
        "stream_options",
        "request_id",
    }
)
_KINDS: Final = re.compile(rb'"type"\s*:\s*"(\w{1,32})"')
_NAME: Final = re.compile(r"\w{1,64}", re.ASCII)


class Shape(NamedTuple):
    """`options` are names of fields, some with a kind; `size` is the bit length of the number of prompt tokens."""

    endpoint: Endpoint
    options: frozenset[str]
    size: int

    def __str__(self) -> str:
        most = (1 << self.size) - 1
        return f"{self.endpoint}, {', '.join(sorted(self.options)) or 'no options'}, up to {most} tokens"


def shape_of(call: Call, num_tokens: int) -> Shape:
    """The shape of a call whose prompt has so many tokens."""
    fields = call.fields.keys() - CONTENTS
    options = {name for name in fields if _NAME.fullmatch(name)}
    if len(options) < len(fields):
        options.add("…")  # names that are nobody's: they are the client's to choose, and may be any
    if call.options.temperature == 0:
        options.add("temperature=0")
    for name in ("response_format", "tool_choice"):
        if name in options and (kind := _KINDS.search(bytes(call.fields[name]))):
            options.add(f"{name}={kind[1].decode()}")
    return Shape(call.endpoint, frozenset(options), num_tokens.bit_length())

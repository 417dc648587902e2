"""Lists the fields that this engine ignores. A gateway refuses them before any node reserves memory. `check_supported`
refuses the same, and decides in the end: the gateway knows values of single fields, not combinations.
"""

from typing import Any, Final

import msgspec

from engine.openai.api import NOTHING, ONLY, UnsupportedOptions

# Fields of `check_supported` with the values that ask for nothing, beside those that are nothing everywhere.
_HARMLESS: Final[dict[str, tuple[Any, ...]]] = {
    "tools": (),
    "response_format": ({"type": "text"},),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "echo": (),
    "suffix": (),
    "documents": (),
}


def not_done_json() -> str:
    """The fields, each with the values that ask for nothing, as a JSON object."""
    fields = {name: list(NOTHING) for name in UnsupportedOptions.__struct_fields__}
    fields |= {name: [None, *values] for name, values in ONLY.items()}
    fields |= {name: [*NOTHING, *values] for name, values in _HARMLESS.items()}
    return msgspec.json.encode(fields).decode()

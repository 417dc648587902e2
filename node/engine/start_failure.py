"""Why an engine never came up, read off the log of its start: a reason that every other start would end with.

Our own engine, and our connector inside vLLM, say so in a line of their own. What vLLM finds wrong it says as an exception, whose
kind tells: a value that cannot be will not become one, while memory, sockets and downloads may be there next time. Where
that is not clear the engine is started again, and a second end of the same settles it.
"""

import re
from dataclasses import dataclass
from typing import Final

from transport.control.last_words import CANNOT_SERVE

MOST_BYTES: Final = 1 << 20  # of a log that are read
MOST_CHARACTERS: Final = 500  # of a reason

# Exceptions, at the end of their tracebacks. vLLM's processes put their name before every line.
_EXCEPTION: Final = re.compile(
    r"^(?:\([^)]*\) )?(?:ERROR [^\]]*\] )?(?:\w+\.)*(\w*(?:Error|Exception|Exhausted|Interrupt))(?:: (.*))?$", re.M
)
FINAL: Final = frozenset(
    {
        "AssertionError", "AttributeError", "ImportError", "KeyError", "LayoutError", "ModuleNotFoundError",
        "NotImplementedError", "SafetensorError", "TypeError", "ValidationError", "ValueError", "VLLMValidationError",
    }
)  # fmt: skip
# Said in exceptions of whatever kind; they may pass.
PASSING: Final = re.compile(
    r"memory|no space left|too many open files|address already in use|connect|timed? ?out|download|resolve|temporar|"
    r"remote process",
    re.I,
)
PASSING_KINDS: Final = frozenset(
    {"MemoryError", "OutOfMemoryError", "TimeoutError", "ConnectionError", "KeyboardInterrupt"}
)


@dataclass(frozen=True, slots=True)
class Cause:
    """Of a start's end, in one line; `is_final`: another start would end of it as well."""

    reason: str
    is_final: bool


def cause_in(log: str) -> Cause | None:
    """What a start ended of, as its log says; None: of something that may pass, or nothing that it tells."""
    if (at := log.rfind(CANNOT_SERVE)) >= 0:
        return Cause(_line(log[at + len(CANNOT_SERVE) :]), is_final=True)
    found = [(match[1], match[2] or "", match.end()) for match in _EXCEPTION.finditer(log)]
    if not found or any(kind in PASSING_KINDS or PASSING.search(said) for kind, said, _ in found):
        return None
    # The first is the cause: others are raised over it.
    kind, said, end = next((each for each in found if each[0] in FINAL), found[0])
    if not said or kind == "ValidationError":  # pydantic counts there, and says it below
        said = log[end + 1 :].partition("\n")[0].strip() or said
    return Cause(_line(f"{kind}: {said}"), is_final=kind in FINAL)


def _line(text: str) -> str:
    line = text.partition("\n")[0].strip()
    return line if len(line) <= MOST_CHARACTERS else f"{line[: MOST_CHARACTERS - 1]}…"

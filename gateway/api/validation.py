"""What the fields of a request may say, and say together: told before anything is decided or reserved for it.

An engine would refuse the same, but only once a decode node has made room. The rules are OpenAI's where vLLM has them, too;
what either of them takes is not refused here. Sizes are bounds of this gateway's own.
"""

import re
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from gateway.errors import BadRequest

MAX_STOPS: Final = 256  # OpenAI takes 4, vLLM as many as come
MAX_STOP_CHARS: Final = 1024
MAX_TOOLS: Final = 1024
MAX_ANSWERS: Final = 128  # of one request: `n`, as OpenAI bounds it
LEAST_SEED, MOST_SEED = -(1 << 63), (1 << 63) - 1  # vLLM's

FUNCTION_NAME: Final = re.compile(
    r"[A-Za-z0-9_.:/-]{1,128}"
)  # OpenAI: letters, digits, _ and -, 64 at most; servers of MCP use more

Stop = Annotated[str, Meta(max_length=MAX_STOP_CHARS)]
Stops = Annotated[list[Stop], Meta(max_length=MAX_STOPS)]
Name = Annotated[str, Meta(min_length=1, max_length=128)]


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True):
    """`response_format.json_schema`."""

    name: Name
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """`response_format`; `structural_tag` is vLLM's, whose further fields it answers for."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """`tools[].function`."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """`tools[]`: functions are what engines of this family know."""

    type: Literal["function"]
    function: Function


class NamedFunction(msgspec.Struct, frozen=True):
    """`tool_choice.function`."""

    name: Name


class NamedTool(msgspec.Struct, frozen=True, kw_only=True):
    """`tool_choice`, where it is one tool."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool
Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]


def check_format(given: ResponseFormat) -> None:
    """Raises BadRequest for a schema that is announced and does not come."""
    if given.type == "json_schema" and given.json_schema is None:
        raise BadRequest(
            "Missing required parameter: 'response_format.json_schema'.",
            param="response_format.json_schema",
            code="missing_required_parameter",
        )


def check_tools(tools: list[Tool] | None, choice: ToolChoice | None) -> None:
    """Raises BadRequest for a choice among tools that are not there."""
    names = [tool.function.name for tool in tools or ()]
    for index, name in enumerate(names):
        if not FUNCTION_NAME.fullmatch(name):
            raise _invalid(f"tools[{index}].function.name", f"'{name}' is not a function's name")
    if choice in (None, "none"):
        return
    if not names:
        raise _invalid("tool_choice", "it is only allowed with 'tools'")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise _invalid("tool_choice.function.name", f"'{choice.function.name}' must be one of 'tools'")


def check_stream(stream: bool | None) -> None:
    """Raises BadRequest for options of a stream that is not asked for."""
    if not stream:
        raise _invalid("stream_options", "it is only allowed when 'stream' is true")


def check_top_logprobs(logprobs: bool | None) -> None:
    """Raises BadRequest for alternatives to tokens whose log probabilities are not asked for."""
    if not logprobs:
        raise _invalid("top_logprobs", "it is only allowed when 'logprobs' is true")


def check_continued(add_generation_prompt: bool | None) -> None:
    """Raises BadRequest for an answer that is to go on in the last message, and to begin a new one."""
    if add_generation_prompt:
        raise _invalid("continue_final_message", "it cannot be combined with 'add_generation_prompt'")


def check_best_of(best_of: int, n: int) -> None:
    """Raises BadRequest unless every answer that is computed is one that is given: no engine here computes spare ones."""
    if best_of < n:
        raise _invalid("best_of", "it must not be less than 'n'")
    if best_of > n:
        raise BadRequest(
            "'best_of' above 'n' is not supported: the engines cannot choose among answers.",
            param="best_of",
            code="unsupported",
        )


def _invalid(param: str, what: str) -> BadRequest:
    return BadRequest(f"Invalid value for '{param}': {what}.", param=param, code="invalid_value")


def too_many(number: int, param: str, most: int = MAX_ANSWERS) -> BadRequest:
    """The refusal of more answers than one request may ask for."""
    what = f"{number} answers are more than the {most} that may be under way at once"
    return BadRequest(f"Invalid value for '{param}': {what}.", param=param, code="invalid_value")

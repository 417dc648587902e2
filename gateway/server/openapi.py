"""The API as an OpenAPI document, made of the very structs that bodies are checked with: `GET /openapi.json`.

What an engine may know beyond them passes through, so no object is closed. Answers are engines', and described by their kind.
"""

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Final, get_args

import msgspec
from msgspec import Meta

from gateway.api.cache_control import CONTROL, MAX_KEY_CHARS, TTL_S
from gateway.api.cache_control import KEY as CACHE_KEY
from gateway.api.cache_control import OPTIONS as OPTIONS_OF_CACHE
from gateway.api.dialects.anthropic_request import MessagesRequest
from gateway.api.dialects.responses_request import Item, ResponsesRequest
from gateway.api.openai import OPTIONS, RESERVED, Endpoint
from gateway.api.validation import Tools
from gateway.prompt.tokenize import Detokenise

PATH: Final = "/openapi.json"
REF: Final = "#/components/schemas/{name}"
TOKENISE: Final = ("/tokenize", "/v1/tokenize")
DETOKENISE: Final = ("/detokenize", "/v1/detokenize")
# vLLM serves these for models that embed or score, under the same paths.
PASSED_ON: Final = ("/v1/embeddings", "/v1/rerank", "/rerank", "/v1/score", "/score")
CONTEXTS: Final = "/v1/contexts"
HEALTH: Final = ("/health", "/livez", "/readyz")

Json = dict[str, Any]
# What `gateway.prompt.prompt` decodes by itself, in threads.
_CHAT_PROMPT: Final[dict[str, Any]] = {
    "messages": Annotated[list[dict[str, Any]], Meta(min_length=1)],
    "tools": Tools | None,
    "documents": list[Any] | None,
    "chat_template_kwargs": dict[str, Any] | None,
}
_TEXT_PROMPT: Final[dict[str, Any]] = {"prompt": str | list[int | str | list[int]]}
_ERROR: Final[Json] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
# As `gateway.prompt.cache_breakpoints` decodes them; marks stand in messages and their parts, too.
_CONTROL: Final[Json] = {
    "type": ["object", "null"],
    "required": ["type"],
    "properties": {"type": {"const": "ephemeral"}, "ttl": {"enum": list(TTL_S)}},
}
_CACHING: Final[Json] = {
    CONTROL: _CONTROL,
    OPTIONS_OF_CACHE: {
        "type": ["object", "null"],
        "properties": {"mode": {"enum": ["implicit", "explicit"]}, "ttl": {"enum": list(TTL_S)}},
    },
    CACHE_KEY: {"type": ["string", "null"], "maxLength": MAX_KEY_CHARS},
}


def _message(marks: Json) -> Json:
    """As every template relies on it (`prompts.reading`); what else a message says, the template makes of it what it will."""
    part = {"type": "object", "required": ["type"], "properties": marks}
    parts = {"type": "array", "items": {"anyOf": [{"type": "string"}, part]}}
    content = {"anyOf": [{"type": ["string", "null"]}, parts]}
    return {
        "type": "object",
        "required": ["role"],
        "properties": {"role": {"type": "string"}, "content": content, **marks},
    }


_EVENT: Final[Json] = {"type": "object", "properties": {"data": {"type": "string"}, "event": {"type": "string"}}}
_STATUSES: Final = {
    400: "The request is wrong; `param` names the field.",
    401: "A key is wanted, and it is missing or wrong.",
    404: "There is no such path or model, or the engine does not serve it.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    415: "The body is no JSON.",
    429: "More than is allowed, or can be served as promised: `Retry-After`, `retry-after-ms`, why in `x-prfaas-rejected`.",
    500: "An error of the gateway's own.",
    502: "A node failed.",
    503: "No node can serve this now; the reason in `x-prfaas-rejected`.",
}
_SUMMARIES: Final = {
    Endpoint.CHAT: "OpenAI's chat completions.",
    Endpoint.COMPLETIONS: "OpenAI's completions.",
    Endpoint.MESSAGES: "Anthropic's messages, as a chat.",
    Endpoint.COUNT_TOKENS: "How many tokens the prompt of a message has.",
    Endpoint.RESPONSES: "OpenAI's responses, as a chat; nothing is kept.",
}


def document(models: Sequence[str] = ()) -> bytes:
    """The document, as JSON; `models` are the names that the served model goes by, if one is known."""
    types = [*OPTIONS.values(), MessagesRequest, ResponsesRequest, Item, Detokenise]
    prompts = [*_CHAT_PROMPT.values(), *_TEXT_PROMPT.values()]
    shapes, components = msgspec.json.schema_components([*types, *prompts], ref_template=REF)
    named = dict(zip([*_CHAT_PROMPT, *_TEXT_PROMPT], shapes[len(types) :], strict=True))
    options = {endpoint: _name(kind) for endpoint, kind in OPTIONS.items()}
    for endpoint, prompt in ((Endpoint.CHAT, _CHAT_PROMPT), (Endpoint.COMPLETIONS, _TEXT_PROMPT)):
        component = components[options[endpoint]]
        component["properties"] |= {name: named[name] for name in prompt} | _CACHING
        if endpoint is Endpoint.CHAT:
            component["properties"]["messages"]["items"] = _message({CONTROL: _CONTROL})
        component["required"] = [endpoint.prompt_field, *component["required"]]
        component["not"] = {"anyOf": [{"required": [name]} for name in RESERVED]}
    items = {"type": "array", "minItems": 1, "items": {"anyOf": [_ref(_name(kind)) for kind in get_args(Item)]}}
    components["MessageItem"]["required"].remove("type")  # what has none is a message
    components["ResponsesRequest"]["properties"]["input"] = {"anyOf": [{"type": "string"}, items]}
    components["ResponsesRequest"]["properties"] |= _CACHING
    components["CountTokensRequest"] = _counted(components["MessagesRequest"])
    components["Error"] = _ERROR
    if models:
        for name in (*options.values(), "MessagesRequest", "CountTokensRequest", "ResponsesRequest"):
            components[name]["properties"]["model"] = {"enum": list(dict.fromkeys(models))}
    bodies = {
        **options, Endpoint.MESSAGES: "MessagesRequest", Endpoint.COUNT_TOKENS: "CountTokensRequest",
        Endpoint.RESPONSES: "ResponsesRequest",
    }  # fmt: skip
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "PrfaaS gateway", "version": _version(), "license": {"name": "Apache-2.0"}},
            "paths": _generation(bodies) | _tokens() | _passed_on() | _pages(),
            "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
            "security": [{}, {"key": []}],
        }
    )


def _generation(bodies: dict[Endpoint, str]) -> Json:
    paths = {}
    for endpoint, body in bodies.items():
        kinds: Json = {"application/json": {"schema": {"type": "object"}}}
        if endpoint is not Endpoint.COUNT_TOKENS:
            kinds["text/event-stream"] = {"schema": _EVENT}
        paths[endpoint.value] = {"post": _operation(_SUMMARIES[endpoint], _ref(body), kinds)}
    return paths


def _tokens() -> Json:
    told = {"type": "object", "required": ["count", "max_model_len", "tokens", "token_strs"]}
    text = {"type": "object", "required": ["prompt"], "properties": {"prompt": {"type": "string"}}}
    strings = {"return_token_strs": {"type": ["boolean", "null"]}, "model": {"type": ["string", "null"]}}
    asked = {
        "type": "object",
        "properties": strings
        | {
            "prompt": {"type": ["string", "array"]},
            "messages": {"type": "array", "minItems": 1, "items": _message({})},
        },
        "oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}],
    }
    tokenise = _operation("The tokens that a prompt or a chat is read as.", asked, _json(told))
    detokenise = _operation("The text of tokens.", _ref(_name(Detokenise)), _json(text))
    return {path: {"post": tokenise} for path in TOKENISE} | {path: {"post": detokenise} for path in DETOKENISE}


def _passed_on() -> Json:
    asked = {"type": "object", "properties": {"model": {"type": ["string", "null"]}}}
    operation = _operation("Passed on to an engine that has it; else 404.", asked, _json({"type": "object"}))
    return {path: {"post": operation} for path in PASSED_ON}


def _pages() -> Json:
    page = {"200": {"description": "As it is.", "content": _json({"type": "object"})}} | _errors((404, 503))
    model = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    paths: Json = {path: {"get": {"summary": "Whether requests are served.", "responses": page}} for path in HEALTH}
    paths["/v1/models"] = {"get": {"summary": "The model that is served.", "responses": page}}
    paths["/v1/models/{model}"] = {"get": {"summary": "One model.", "parameters": [model], "responses": page}}
    named = {"name": "context_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    asked = page | _errors((401,))
    paths[CONTEXTS] = {"get": {"summary": "The prefixes of prompts that are kept for who asks.", "responses": asked}}
    ended = {"summary": "Keeps one no longer.", "parameters": [named], "responses": asked}
    paths[CONTEXTS + "/{context_id}"] = {"delete": ended}
    paths[PATH] = {"get": {"summary": "This document.", "responses": page}}
    return paths


def _operation(summary: str, body: Json, answer: Json) -> Json:
    asked = {"required": True, "content": {"application/json": {"schema": body}}}
    request_id = {"name": "x-request-id", "in": "header", "required": False, "schema": {"type": "string"}}
    responses = {"200": {"description": "The answer.", "content": answer}} | _errors(tuple(_STATUSES))
    return {"summary": summary, "parameters": [request_id], "requestBody": asked, "responses": responses}


def _errors(statuses: tuple[int, ...]) -> Json:
    content = _json(_ref("Error"))
    return {str(status): {"description": _STATUSES[status], "content": content} for status in statuses}


def _counted(messages: Json) -> Json:
    """A body of `/v1/messages` without what is said of the answer."""
    properties = {name: shape for name, shape in messages["properties"].items() if name != "max_tokens"}
    required = [name for name in messages["required"] if name != "max_tokens"]
    return messages | {"title": "CountTokensRequest", "properties": properties, "required": required}


def _json(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


def _ref(name: str) -> Json:
    return {"$ref": REF.format(name=name)}


def _name(kind: type) -> str:
    return kind.__name__


def _version() -> str:
    try:
        return version("prfaas")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "0"

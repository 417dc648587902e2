"""`/tokenize` and `/detokenize` in vLLM's shapes, by the gateway's own tokenizer: the tokens that a request would be read as.

Functions of values, for threads.
"""

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw

from gateway.api.openai import NOT_JSON, Endpoint, bad_field, call_of, check_fields
from gateway.errors import BadRequest, unknown_model
from gateway.prompt.prompt import PromptMemory, PromptModel, check_name, prompt_tokens
from prompts.tokens.tokenizer import TextTokenizer

MAX_BODY_BYTES: Final = 512 * 1024  # as many tokens at worst, whose list takes 8 ms of the interpreter's lock


class Tokenise(msgspec.Struct, frozen=True, kw_only=True):
    """What `/tokenize` is told beside a prompt or messages."""

    return_token_strs: bool | None = None


class Detokenise(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `/detokenize`."""

    tokens: list[Annotated[int, Meta(ge=0, le=2**32 - 1)]]
    model: str | None = None


_FIELDS: Final = msgspec.json.Decoder(dict[str, Raw])
_TOKENISE: Final = msgspec.json.Decoder(Tokenise)
_DETOKENISE: Final = msgspec.json.Decoder(Detokenise)


def tokens_of(body: bytes, model: PromptModel, memory: PromptMemory, tenant: bytes) -> bytes:
    """The answer to a body of `/tokenize`: of a chat, if it has messages, else of a plain prompt. Raises ApiError."""
    fields, asked = _decoded(body, _FIELDS), _decoded(body, _TOKENISE)
    endpoint = Endpoint.CHAT if "messages" in fields else Endpoint.COMPLETIONS
    if "messages" in fields and "prompt" in fields:
        raise BadRequest("Send either 'prompt' or 'messages', not both.", param="prompt", code="invalid_value")
    named = {"model": Raw(msgspec.json.encode(model.names[0]))}
    check_fields(endpoint, fields)
    call = call_of(endpoint, named | {name: raw for name, raw in fields.items() if bytes(raw) != b"null"})
    check_name(call, model)
    tokens = prompt_tokens(call, memory, tenant)[0].tolist()
    strings = [memory.tokenizer.token_text(token) for token in tokens] if asked.return_token_strs else None
    return msgspec.json.encode(
        {"count": len(tokens), "max_model_len": model.max_model_len, "tokens": tokens, "token_strs": strings}
    )


def text_of(body: bytes, model: PromptModel, tokenizer: TextTokenizer) -> bytes:
    """The answer to a body of `/detokenize`, special tokens spelled out. Raises ApiError."""
    asked: Detokenise = _decoded(body, _DETOKENISE)
    if asked.model is not None and asked.model not in model.names and asked.model not in model.adapters:
        raise unknown_model(asked.model, model.names[0])
    if asked.tokens and max(asked.tokens) > tokenizer.max_token_id:
        what = f"token ids must be in [0, {tokenizer.max_token_id}]"
        raise BadRequest(f"Invalid value for 'tokens': {what}.", param="tokens", code="invalid_value")
    return msgspec.json.encode({"prompt": tokenizer.spell(asked.tokens)})


def _decoded(body: bytes, decoder: msgspec.json.Decoder[Any]) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise bad_field(error) from error
    except NOT_JSON as error:
        raise BadRequest(f"The body is not valid JSON: {error}", code="invalid_json") from error

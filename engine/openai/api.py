"""The OpenAI surface as values: requests, parsed and checked once.

Beyond OpenAI's fields: `top_k`, `min_tokens`, `ignore_eos`, `stop_token_ids`, `return_token_ids` and `kv_transfer_params`,
as vLLM spells them.
"""

import re
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from engine.errors import RequestError
from engine.runtime.sampling import MAX_TOP_LOGPROBS, SamplingParams
from engine.runtime.turns import EVERYBODYS, WorkShare
from hybrid_cache.cache.reservation import NO_HINTS, Hints
from prompts.errors import BadPrompt
from prompts.reading import Chat, chat_tokens, completion_tokens
from prompts.tokens.segments import TokenArray
from prompts.tokens.tokenizer import TextTokenizer
from transport.control.messages import TicketInfo

ANSWERED_HEADER: Final = "x-prfaas-answered"  # after how many tokens a stream goes on; who ignores them does not say so
NOT_RESUMABLE_HEADER: Final = "x-prfaas-not-resumable"  # why a stream's tokens are not named, though that was asked for
DEFAULT_COMPLETION_TOKENS: Final = 16  # as OpenAI's /v1/completions
SEEDS: Final = 1 << 64  # those below 0 are others than those above
MAX_STOPS: Final = 256
MAX_STOP_CHARS: Final = 1024
DEFAULT_LANDING_TIMEOUT_S: Final = 300.0
MAX_TENANT_CHARS: Final = 128
LEAST_WEIGHT, MOST_WEIGHT = 1e-3, 1e3

Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]
TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Temperature = Annotated[float, Meta(ge=0.0, le=2.0)]
TopP = Annotated[float, Meta(gt=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Weight = Annotated[float, Meta(ge=LEAST_WEIGHT, le=MOST_WEIGHT)]
R = TypeVar("R")

NOTHING: Final[tuple[Any, ...]] = (None, False, [], {}, "")  # values that ask for nothing


class EngineStreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False


class KVTransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway says beside the client's words.

    `resumable`: the chunks of a stream name their tokens, so that another engine can go on should this one die. `answered`:
    the tokens of the answer that a client has had from another engine; what follows them is asked for. `tenant`: whose turn it
    takes here, with a part of `weight` beside others; requests without a tenant are one. For `branch_tokens`, `category` and
    `useful_tokens` see BeginPrefill, which says them to the agent.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    ticket: TicketInfo | None = None
    transfer_id: str | None = None
    salt: str = ""
    timeout_s: Annotated[float, Meta(gt=0.0)] | None = None
    resumable: bool = False
    answered: list[TokenId] = []
    tenant: Annotated[str, Meta(max_length=MAX_TENANT_CHARS)] = ""
    weight: Weight = 1.0
    branch_tokens: Annotated[tuple[NotNegative, ...], Meta(max_length=8)] = ()
    category: str = ""
    useful_tokens: NotNegative | None = None


class UnsupportedOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of OpenAI's and vLLM's that would change the answer, and that this engine ignores."""

    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    structural_tag: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None
    logits_processors: Any = None
    prompt_logprobs: Any = None
    include_stop_str_in_output: Any = None
    return_tokens_as_token_ids: Any = None
    vllm_xargs: Any = None
    mm_processor_kwargs: Any = None
    chat_template: Any = None
    functions: Any = None
    audio: Any = None
    web_search_options: Any = None
    prompt_embeds: Any = None


# The same, but for values that ask for what is done anyway.
ONLY: Final[dict[str, tuple[Any, ...]]] = {
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "function_call": ("none",),
    "tool_choice": ("none", "auto"),
    "modalities": (["text"],),
}


class _Common(UnsupportedOptions, frozen=True, kw_only=True):
    model: str
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    function_call: Any = None
    tool_choice: Any = None
    modalities: Any = None
    tools: list[Any] | None = None
    response_format: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    max_tokens: Positive | None = None
    min_tokens: NotNegative | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    n: Positive | None = None
    stream: bool | None = None
    stream_options: EngineStreamOptions | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    seed: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    kv_transfer_params: KVTransferParams | None = None


class CompletionRequest(_Common, frozen=True, kw_only=True):
    prompt: str | list[Any]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Positive | None = None


class ChatRequest(_Common, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    documents: list[Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


OpenAIRequest = CompletionRequest | ChatRequest


@dataclass(frozen=True, slots=True)
class KVTransfer:
    """A request's transfer: none, send KVCache (`ticket`) or receive it (`transfer_id`). It also has the request's
    tenant.
    """

    salt: bytes = b""
    ticket: TicketInfo | None = None
    transfer_id: str | None = None
    timeout_s: float = DEFAULT_LANDING_TIMEOUT_S
    hints: Hints = NO_HINTS
    part: WorkShare = EVERYBODYS


def parse_request(body: bytes, kind: type[R]) -> R:
    """A request body as a value. Raises RequestError naming the field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as exc:
        message, param = _readable(str(exc))
        raise RequestError(message, param=param) from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise RequestError(f"the body is not valid JSON: {exc}", code="invalid_json") from exc


def check_supported(request: OpenAIRequest) -> None:
    """Refuses fields that the engine would silently ignore. Raises RequestError."""
    if request.n not in (None, 1):
        raise RequestError("n: only one choice per request is supported", param="n")
    for name in UnsupportedOptions.__struct_fields__:
        value = getattr(request, name)
        _refuse(value not in NOTHING or (value == 0 and value is not False), name)
    for name, done in ONLY.items():
        _refuse(getattr(request, name) not in (None, *done), name)
    _refuse(bool(request.tools), "tools")
    if request.response_format is not None:
        _refuse(request.response_format.get("type", "text") != "text", "response_format")
    # The rules of a tokenizer for plain prompts, those of a template for chats.
    _refuse(request.add_special_tokens not in (None, isinstance(request, CompletionRequest)), "add_special_tokens")
    _refuse(request.min_p not in (None, 0.0), "min_p")
    _refuse(request.repetition_penalty not in (None, 1.0), "repetition_penalty")
    # A prefill leg is a client's body with `stream` turned off.
    leg = request.kv_transfer_params is not None and request.kv_transfer_params.do_remote_decode
    if request.stream_options is not None and not request.stream and not leg:
        raise RequestError("stream_options: only allowed when stream is true", param="stream_options")
    if isinstance(request, CompletionRequest):
        _refuse(request.best_of not in (None, 1), "best_of")
        _refuse(bool(request.echo), "echo")
        _refuse(bool(request.suffix), "suffix")
        return
    _refuse(bool(request.documents), "documents")
    if request.continue_final_message and request.add_generation_prompt:
        raise RequestError(
            "continue_final_message: it cannot be combined with add_generation_prompt", param="continue_final_message"
        )
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs: only allowed when logprobs is true", param="top_logprobs")


def prompt_tokens(request: OpenAIRequest, tokenizer: TextTokenizer, vocab_size: int) -> list[int]:
    """The prompt as token ids, at least one. Raises RequestError."""
    param = "messages" if isinstance(request, ChatRequest) else "prompt"
    try:
        tokens = _tokens(request, tokenizer).tolist()
    except BadPrompt as exc:
        raise RequestError(exc.message, param=exc.param, code=exc.code) from exc
    if not tokens:
        raise RequestError(f"{param}: the prompt has no tokens", param=param)
    if max(tokens) >= vocab_size:
        raise RequestError(f"{param}: token ids must be in [0, {vocab_size})", param=param)
    return list(tokens)


def _tokens(request: OpenAIRequest, tokenizer: TextTokenizer) -> TokenArray:
    if isinstance(request, CompletionRequest):
        return completion_tokens(request.prompt, tokenizer)
    chat = Chat(
        messages=request.messages,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        chat_template_kwargs=request.chat_template_kwargs,
        reasoning_effort=request.reasoning_effort,
    )
    return chat_tokens(chat, tokenizer)


def answered_tokens(request: OpenAIRequest, params: SamplingParams, vocab_size: int) -> list[int]:
    """The tokens of the answer that another engine has given before. Raises RequestError."""
    transfer = request.kv_transfer_params
    if transfer is None or not transfer.answered:
        return []
    param = "kv_transfer_params.answered"
    if max(transfer.answered) >= vocab_size:
        raise RequestError(f"{param}: token ids must be in [0, {vocab_size})", param=param)
    if not transfer.do_remote_decode and not request.stream:
        raise RequestError(f"{param}: only a stream is continued", param=param)
    if not transfer.do_remote_decode and len(transfer.answered) >= params.max_tokens:
        raise RequestError(f"{param}: the answer is complete, {params.max_tokens} tokens were asked for", param=param)
    return transfer.answered


def sampling_params(
    request: OpenAIRequest, num_prompt_tokens: int, max_model_len: int, vocab_size: int, seed: int
) -> SamplingParams:
    """Sampling parameters with OpenAI's defaults; `seed` is for requests that bring none. Raises RequestError."""
    room = max_model_len - num_prompt_tokens
    wanted = request.max_tokens
    if isinstance(request, ChatRequest):
        wanted = request.max_completion_tokens or wanted
    elif wanted is None:
        wanted = min(DEFAULT_COMPLETION_TOKENS, max(room, 1))
    if room < 1 or (wanted or 0) > room:
        raise _too_long(request, num_prompt_tokens, wanted, max_model_len)
    if (request.min_tokens or 0) > (wanted or room):
        raise RequestError(f"min_tokens: at most max_tokens, {wanted or room}", param="min_tokens")
    return SamplingParams(
        max_tokens=wanted or room,
        min_tokens=request.min_tokens or 0,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(0, request.top_k or 0),
        seed=(seed if request.seed is None else request.seed) % SEEDS,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=_logit_bias(request.logit_bias, vocab_size),
        stop=_stops(request.stop),
        stop_token_ids=_stop_tokens(request.stop_token_ids, vocab_size),
        ignore_eos=bool(request.ignore_eos),
        top_logprobs=top_logprobs(request),
    )


def transfer_of(params: KVTransferParams | None) -> KVTransfer:
    """Parses `kv_transfer_params`. Raises RequestError."""
    if params is None:
        return KVTransfer()
    if params.do_remote_decode and params.do_remote_prefill:
        raise RequestError("a request is either a prefill leg or a decode leg", param="kv_transfer_params")
    transfer = KVTransfer(
        salt=_unhex(params.salt, "kv_transfer_params.salt"),
        timeout_s=params.timeout_s or DEFAULT_LANDING_TIMEOUT_S,
        hints=Hints(branch_tokens=params.branch_tokens, category=params.category, useful_tokens=params.useful_tokens),
        part=WorkShare(params.tenant, params.weight),
    )
    if params.do_remote_decode:
        if params.ticket is None:
            raise RequestError("a prefill leg needs a ticket", param="kv_transfer_params.ticket")
        return replace(transfer, ticket=params.ticket)
    if params.do_remote_prefill:
        if not params.transfer_id:
            raise RequestError("a decode leg needs a transfer_id", param="kv_transfer_params.transfer_id")
        return replace(transfer, transfer_id=params.transfer_id)
    return transfer


def _refuse(condition: bool, param: str) -> None:
    if condition:
        raise RequestError(f"{param}: not supported by this engine", param=param, code="unsupported_parameter")


def _readable(text: str) -> tuple[str, str | None]:
    """msgspec's "Expected `int`, got `str` - at `$.max_tokens`" as a message and a parameter name."""
    missing = re.match(r"Object missing required field `(\w+)`(?: - at `\$\.?(.*)`)?$", text)
    if missing:
        param = ".".join(part for part in (missing[2], missing[1]) if part)
        return f"{param}: this field is required", param
    placed = re.match(r"(.*) - at `\$\.?(.*)`$", text)
    if not placed or not placed[2]:
        return text, None
    reason = placed[1]
    return f"{placed[2]}: {reason[:1].lower()}{reason[1:]}", placed[2]


def _too_long(request: OpenAIRequest, num_prompt: int, wanted: int | None, max_model_len: int) -> RequestError:
    param = "messages" if isinstance(request, ChatRequest) else "prompt"
    asked = f"your request has {num_prompt} tokens in the {param}"
    if wanted is not None:
        asked += f" and asks for {wanted} more"
    return RequestError(
        f"This model's maximum context length is {max_model_len} tokens, but {asked}.",
        param=param,
        code="context_length_exceeded",
    )


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS or any(len(text) > MAX_STOP_CHARS for text in stops):
        raise RequestError(f"stop: at most {MAX_STOPS} strings of {MAX_STOP_CHARS} characters", param="stop")
    return tuple(text for text in stops if text)


def _stop_tokens(tokens: list[int] | None, vocab_size: int) -> tuple[int, ...]:
    if tokens and max(tokens) >= vocab_size:
        raise RequestError(f"stop_token_ids: token ids must be in [0, {vocab_size})", param="stop_token_ids")
    return tuple(tokens or ())


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float]:
    try:
        by_token = {int(token): value for token, value in (bias or {}).items()}
    except ValueError:
        raise RequestError("logit_bias: keys must be token ids", param="logit_bias") from None
    if any(not 0 <= token < vocab_size for token in by_token) or any(abs(v) > 100 for v in by_token.values()):
        raise RequestError(
            f"logit_bias: token ids must be in [0, {vocab_size}), values in [-100, 100]", param="logit_bias"
        )
    return by_token


def top_logprobs(request: OpenAIRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return request.logprobs
    return (request.top_logprobs or 0) if request.logprobs else None


def _unhex(text: str, param: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise RequestError(f"{param}: expected hexadecimal digits", param=param) from None

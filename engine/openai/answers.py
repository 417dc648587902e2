"""Answers of the OpenAI surface: whole ones, chunks of a stream, errors."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import RequestError
from engine.openai.api import ChatRequest, OpenAIRequest, top_logprobs
from engine.runtime.sampling import SampledToken
from prompts.tokens.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class TokenUsage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class AnswerShape:
    """How one answer is spelled: chat or plain completion, whole or in chunks."""

    def __init__(
        self,
        request: OpenAIRequest,
        request_id: str,
        created_s: int,
        tokenizer: TextTokenizer,
        answered: Sequence[int] = (),
    ) -> None:
        """`answered` are the tokens whose chunks another engine has spelled; these go on after them."""
        self._chat = isinstance(request, ChatRequest)
        self._model = request.model
        transfer = request.kv_transfer_params
        self._with_tokens = bool(request.return_token_ids) or (transfer is not None and transfer.resumable)
        self._with_usage = bool(request.stream_options and request.stream_options.include_usage)
        self._with_logprobs = top_logprobs(request) is not None
        self._tokenizer = tokenizer
        self._created_s = created_s
        self._id = f"{'chatcmpl' if self._chat else 'cmpl'}-{request_id}"
        self._first = not answered
        self._text_offset = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        for token in answered if self._with_logprobs else ():
            self._next_offset(token)

    def whole(
        self,
        text: str,
        sampled: Sequence[SampledToken],
        finish_reason: str,
        usage: TokenUsage,
        prompt: Sequence[int],
        kv_transfer_params: dict[str, Any] | None,
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        choice["logprobs"] = self._logprobs(sampled) if self._with_logprobs else None
        if self._with_tokens:
            choice["token_ids"] = [token.token for token in sampled]
            if not self._chat:
                choice["prompt_token_ids"] = list(prompt)
        answer = self._envelope([choice], chunk=False) | {"usage": usage.to_dict()}
        if self._with_tokens and self._chat:
            answer["prompt_token_ids"] = list(prompt)
        return answer | _optional(kv_transfer_params)

    def chunk(
        self,
        text: str,
        sampled: Sequence[SampledToken],
        finish_reason: str | None,
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason}
        if self._chat:
            choice["delta"] = ({"role": "assistant"} if self._first else {}) | {"content": text}
        else:
            choice["text"] = text
        self._first = False
        choice["logprobs"] = self._logprobs(sampled) if self._with_logprobs else None
        if self._with_tokens:
            choice["token_ids"] = [token.token for token in sampled]
        usage: dict[str, Any] = {"usage": None} if self._with_usage else {}
        return self._envelope([choice], chunk=True) | usage | _optional(kv_transfer_params)

    def usage_chunk(self, usage: TokenUsage, kv_transfer_params: dict[str, Any] | None) -> dict[str, Any] | None:
        """The last chunk, if the client wants one."""
        if not self._with_usage:
            return None
        return self._envelope([], chunk=True) | {"usage": usage.to_dict()} | _optional(kv_transfer_params)

    def _envelope(self, choices: list[dict[str, Any]], *, chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self._chat else "text_completion"
        return {
            "id": self._id,
            "object": kind,
            "created": self._created_s,
            "model": self._model,
            "choices": choices,
        }

    def _logprobs(self, sampled: Sequence[SampledToken]) -> dict[str, Any]:
        return self._chat_logprobs(sampled) if self._chat else self._completion_logprobs(sampled)

    def _chat_logprobs(self, sampled: Sequence[SampledToken]) -> dict[str, Any]:
        def entry(token: int, logprob: float | None) -> dict[str, Any]:
            raw = list(self._tokenizer.token_bytes(token))
            return {"token": self._name(token), "logprob": _finite(logprob), "bytes": raw}

        return {
            "content": [
                entry(s.token, s.logprob) | {"top_logprobs": [entry(t.token, t.logprob) for t in s.top]}
                for s in sampled
            ]
        }

    def _completion_logprobs(self, sampled: Sequence[SampledToken]) -> dict[str, Any]:
        return {
            "tokens": [self._name(s.token, "bytes:") for s in sampled],
            "token_logprobs": [_finite(s.logprob) for s in sampled],
            "top_logprobs": [self._by_name(s) for s in sampled],
            "text_offset": [self._next_offset(s.token) for s in sampled],
        }

    def _by_name(self, sampled: SampledToken) -> dict[str, float | None]:
        """The likeliest tokens and the chosen one; of two tokens with one name, the second is told by its number, as in vLLM."""
        named = {self._name(sampled.token, "bytes:"): _finite(sampled.logprob)}
        for token, logprob in sampled.top:
            if token != sampled.token:
                name = self._name(token, "bytes:")
                named[f"token_id:{token}" if name in named else name] = _finite(logprob)
        return named

    def _name(self, token: int, of_bytes: str = "") -> str:
        r"""The text of a token, or `\xf0` for a piece of a character, as OpenAI names it."""
        raw = self._tokenizer.bytes_of_pieces(token)
        return (
            self._tokenizer.token_text(token) if raw is None else of_bytes + "".join(f"\\x{byte:02x}" for byte in raw)
        )

    def _next_offset(self, token: int) -> int:
        """Where the text of `token` begins, in characters; a piece of a character begins where the character does."""
        offset = self._text_offset
        self._text_offset += len(self._utf8.decode(self._tokenizer.token_bytes(token)))
        return offset


def error_body(error: RequestError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def _finite(logprob: float | None) -> float | None:
    """JSON has no infinity; OpenAI's floor for hopeless tokens is -9999."""
    return None if logprob is None else max(logprob, -9999.0)


def _optional(kv_transfer_params: dict[str, Any] | None) -> dict[str, Any]:
    return {} if kv_transfer_params is None else {"kv_transfer_params": kv_transfer_params}

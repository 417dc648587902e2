"""A small client of our own API: one streamed completion, its tokens and its times."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import aiohttp

from prfaas.errors import PrfaasError

STREAM_TIMEOUT_S = 300.0


class RequestFailed(PrfaasError):
    """The API answered with an error, or the stream broke off. `status` is the answer's (0: there was none), `code` why."""

    def __init__(self, message: str, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(slots=True)
class DemoCompletion:
    """What came back."""

    request_id: str
    route: str
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


async def complete(
    session: aiohttp.ClientSession,
    api_url: str,
    body: dict[str, Any],
    request_id: str,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> DemoCompletion:
    """Streams one /v1/completions call to its end. Raises RequestFailed."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    started_at = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=STREAM_TIMEOUT_S)
    try:
        async with session.post(
            f"{api_url}/v1/completions",
            json=body,
            headers={"x-request-id": request_id, **headers},
            timeout=timeout,
            allow_redirects=False,  # keys and prompts are for this gateway
        ) as answer:
            if answer.status != 200:
                raise RequestFailed(
                    f"{request_id}: HTTP {answer.status}: {(await answer.text())[:300]}",
                    answer.status,
                    answer.headers.get("x-prfaas-rejected", ""),
                )
            result = DemoCompletion(request_id, answer.headers.get("x-prfaas-route", ""))
            async for line in answer.content:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    _take(result, json.loads(line[6:]), time.monotonic() - started_at)
    except (aiohttp.ClientError, TimeoutError, ValueError) as exc:
        raise RequestFailed(f"{request_id}: {exc!r}") from exc
    result.e2e_s = time.monotonic() - started_at
    return result


def _take(result: DemoCompletion, event: dict[str, Any], at_s: float) -> None:
    if error := event.get("error"):
        raise RequestFailed(f"{result.request_id}: {error.get('message')}")
    for choice in event.get("choices") or []:
        if not result.token_ids:
            result.ttft_s = at_s
        result.text += choice.get("text") or ""
        result.token_ids += choice.get("token_ids") or []
    result.usage = event.get("usage") or result.usage

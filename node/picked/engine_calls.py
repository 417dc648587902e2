"""What a node's agent asks its own engine for picked requests: tokens, legs and answers, over loopback."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from io import BytesIO
from typing import Any, Final

import aiohttp
import msgspec

from node.errors import UnansweredCall
from node.picked.bodies import NOT_JSON, TokenIds
from node.picked.legs import LegAnswer, PrefillAsked, engine_body, leg_answer
from transport.control.bounded import BodyTooLong, read_bounded

CONNECT_S: Final = 5.0
RENDER_S: Final = 60.0
SILENT_S: Final = 1800.0  # an answer that is not streamed comes as a whole
KEEP_ALIVE_S: Final = 3.0  # vLLM closes connections after 5 s without a request: we are first
MAX_ANSWER_BYTES: Final = 1 << 20  # to a leg
MAX_TOKENS_BYTES: Final = 256 << 20
REQUEST_ID: Final = "X-Request-Id"
JSON: Final = {"Content-Type": "application/json"}


class _Rendered(msgspec.Struct):
    token_ids: TokenIds


_RENDERED: Final = msgspec.json.Decoder(_Rendered | list[_Rendered])


class EngineCalls:
    """One engine, wherever it listens at the moment."""

    def __init__(self, url: Callable[[], str]) -> None:
        """`url` is "" before the first engine."""
        self._url = url
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENT_S)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)  # those who ask are few enough
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False)

    async def close(self) -> None:
        """Ends what is asked."""
        await self._session.close()

    async def tokens(self, path: str, body: bytes) -> list[int]:
        """The tokens that a request at `path` stands for, by the engine's own reading. Raises UnansweredCall."""
        timeout = aiohttp.ClientTimeout(total=RENDER_S, sock_connect=CONNECT_S)
        status, told = await self._asked(f"{path}/render", body, {}, MAX_TOKENS_BYTES, timeout=timeout)
        if status != 200:
            raise UnansweredCall(f"render_{status}", told[:200].decode("utf-8", "replace"))
        try:
            rendered: Any = _RENDERED.decode(told)
            (one,) = rendered if isinstance(rendered, list) else [rendered]
        except (*NOT_JSON, ValueError) as exc:
            raise UnansweredCall("render_unreadable", str(exc)) from exc
        return list(one.token_ids)

    async def prefill(self, asked: PrefillAsked, served_model: str) -> LegAnswer:
        """Has the engine run a leg for another node. Raises UnansweredCall."""
        named = {REQUEST_ID: asked.request_id}
        body = engine_body(asked, served_model)
        return leg_answer(*await self._asked("/v1/completions", body, named, MAX_ANSWER_BYTES))

    @asynccontextmanager
    async def answer(self, path: str, body: bytes | None, request_id: str) -> AsyncIterator[aiohttp.ClientResponse]:
        """The engine's answer once it begins, to a POST with a body, else to a GET. Raises UnansweredCall."""
        try:
            answer = await self._request(path, body, {REQUEST_ID: request_id})
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise UnansweredCall("engine_unreachable", repr(exc)) from exc
        del body
        try:
            yield answer
        finally:
            answer.close()

    async def _asked(
        self, path: str, body: bytes, headers: dict[str, str], limit_bytes: int, **options: Any
    ) -> tuple[int, bytes]:
        """Status and body of a whole answer."""
        try:
            answer = await self._request(path, body, headers, **options)
            try:
                told = await read_bounded(answer.content.iter_any(), limit_bytes)
            except BaseException:
                answer.close()  # else its engine would go on
                raise
            answer.release()
        except (aiohttp.ClientError, TimeoutError, OSError, BodyTooLong) as exc:
            raise UnansweredCall("engine_unreachable", repr(exc)) from exc
        return answer.status, told

    async def _request(
        self, path: str, body: bytes | None, headers: dict[str, str], **options: Any
    ) -> aiohttp.ClientResponse:
        url = self._url()
        if not url:
            raise UnansweredCall("engine_down", "there has been no engine yet")
        method, headers = ("GET", headers) if body is None else ("POST", JSON | headers)
        headers = {**headers, "Accept-Encoding": "identity"}  # answers are passed on as they are
        data = None if body is None else BytesIO(body)  # long ones leave in parts
        return await self._session.request(
            method, f"{url}{path}", data=data, headers=headers, allow_redirects=False, **options
        )

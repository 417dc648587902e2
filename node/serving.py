"""What an engine says over HTTP: whether it answers yet, long after its Hello, which adapters it serves, how busy it is."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Final

import aiohttp
import msgspec

from transport.control.bounded import BodyTooLong, read_bounded
from transport.control.messages import LoadReport

log = logging.getLogger(__name__)

POLL_S: Final = 0.25
ANSWER_S: Final = 10.0
ADAPTERS_S: Final = 10.0  # between two looks at which adapters there are: they come and go while it runs
LOADS_S: Final = 0.5  # between two looks at how busy it is, and a round trip to its scheduler
MAX_MODELS_BYTES: Final = 1 << 20
MAX_ADAPTERS: Final = 1000


class _Model(msgspec.Struct):
    id: str
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Load(msgspec.Struct):
    num_running_reqs: int
    num_waiting_reqs: int
    num_waiting_uncached_tokens: int = 0
    max_running_requests: int = 0


class _Loads(msgspec.Struct):
    loads: list[_Load]


_LOADS: Final = msgspec.json.Decoder(_Loads)
_MODELS: Final = msgspec.json.Decoder(_Models)


async def serves(url: str) -> None:
    """Returns once `GET {url}/health` says that all is well; who awaits it says how long that may take."""
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while not await _is_well(session, f"{url}/health"):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)  # another process has no Event of ours


async def _is_well(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


async def follow_loads(url: str, tell: Callable[[LoadReport], None]) -> None:
    """Tells how busy `GET {url}/v1/loads` says that an SGLang server is, whenever that has changed; for ever."""
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    known: LoadReport | None = None
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while True:
            found = await _load(session, f"{url}/v1/loads?include=core")
            if found is not None and found != known:
                known = found
                tell(found)
            await asyncio.sleep(LOADS_S)


async def _load(session: aiohttp.ClientSession, url: str) -> LoadReport | None:
    """None: it does not say now."""
    try:
        async with session.get(url) as answer:
            if answer.status != 200:
                return None
            told = _LOADS.decode(await read_bounded(answer.content.iter_any(), MAX_MODELS_BYTES)).loads
    except (aiohttp.ClientError, TimeoutError, OSError, BodyTooLong, msgspec.DecodeError, UnicodeDecodeError) as error:
        log.warning("%s was not understood: %r", url, error)
        return None
    return LoadReport(
        running=sum(each.num_running_reqs for each in told),
        waiting=sum(each.num_waiting_reqs for each in told),
        queued_tokens=sum(each.num_waiting_uncached_tokens for each in told),
        slots=sum(each.max_running_requests for each in told),
    )


async def adapters_of(url: str) -> AsyncIterator[tuple[str, ...]]:
    """Names that `GET {url}/v1/models` has with a parent (vLLM's LoRA adapters), whenever they have changed; for ever."""
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    known: tuple[str, ...] = ()
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while True:
            found = await _adapters(session, f"{url}/v1/models")
            if found is not None and found != known:
                known = found
                yield known
            await asyncio.sleep(ADAPTERS_S)


async def _adapters(session: aiohttp.ClientSession, url: str) -> tuple[str, ...] | None:
    """None: it does not say now."""
    try:
        async with session.get(url) as answer:
            if answer.status != 200:
                return None
            models = _MODELS.decode(await read_bounded(answer.content.iter_any(), MAX_MODELS_BYTES))
    except (aiohttp.ClientError, TimeoutError, OSError, BodyTooLong, msgspec.DecodeError, UnicodeDecodeError) as error:
        log.warning("%s was not understood: %r", url, error)
        return None
    return tuple(sorted(model.id for model in models.data if model.parent is not None)[:MAX_ADAPTERS])

"""What an engine says over HTTP: whether it answers yet, long after its Hello, which adapters it serves, how busy it is."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import aiohttp
import msgspec

from transport.control.bounded import BodyTooLong, read_bounded
from transport.control.messages import LoadReport

T = TypeVar("T")

log = logging.getLogger(__name__)

POLL_S: Final = 0.25
ANSWER_S: Final = 10.0
ADAPTERS_S: Final = 10.0  # between two looks at which adapters there are: they come and go while it runs
LOADS_S: Final = 0.5  # between two looks at how busy it is, and a round trip to its scheduler
MAX_ANSWER_BYTES: Final = 1 << 20
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


class _Question(Generic[T]):
    """Something that an engine is asked again and again. A trouble is logged when it begins, not as often as it is met."""

    def __init__(self, session: aiohttp.ClientSession, url: str, decoder: msgspec.json.Decoder[T]) -> None:
        self._session = session
        self._url = url
        self._decoder = decoder
        self._trouble = ""

    async def ask(self) -> T | None:
        """None: it does not say now."""
        try:
            async with self._session.get(self._url) as answer:
                if answer.status == 200:
                    told = self._decoder.decode(await read_bounded(answer.content.iter_any(), MAX_ANSWER_BYTES))
                    self._trouble = ""
                    return told
                trouble = f"status {answer.status}"
        except (
            aiohttp.ClientError,
            TimeoutError,
            OSError,
            BodyTooLong,
            msgspec.DecodeError,
            UnicodeDecodeError,
            RecursionError,
        ) as error:
            trouble = repr(error)
        if trouble != self._trouble:
            log.warning("%s was not understood: %s", self._url, trouble)
        self._trouble = trouble
        return None


async def follow_loads(url: str, tell: Callable[[LoadReport], None], *, every_s: float = LOADS_S) -> None:
    """Tells how busy `GET {url}/v1/loads` says that an SGLang server is, whenever that has changed; for ever."""
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    known: LoadReport | None = None
    async with aiohttp.ClientSession(timeout=timeout) as session:
        question = _Question(session, f"{url}/v1/loads?include=core", _LOADS)
        while True:
            told = await question.ask()
            if told is not None and (found := _load(told)) != known:
                known = found
                tell(found)
            await asyncio.sleep(every_s)


def _load(told: _Loads) -> LoadReport:
    """Of all its schedulers."""
    return LoadReport(
        running=sum(each.num_running_reqs for each in told.loads),
        waiting=sum(each.num_waiting_reqs for each in told.loads),
        queued_tokens=sum(each.num_waiting_uncached_tokens for each in told.loads),
        slots=sum(each.max_running_requests for each in told.loads),
    )


async def follow_adapters(url: str, tell: Callable[[tuple[str, ...]], None], *, every_s: float = ADAPTERS_S) -> None:
    """Tells which names `GET {url}/v1/models` has with a parent (vLLM's LoRA adapters), whenever that has changed; for ever."""
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    known: tuple[str, ...] = ()
    async with aiohttp.ClientSession(timeout=timeout) as session:
        question = _Question(session, f"{url}/v1/models", _MODELS)
        while True:
            told = await question.ask()
            if told is not None and (found := _adapters(told)) != known:
                known = found
                tell(found)
            await asyncio.sleep(every_s)


def _adapters(told: _Models) -> tuple[str, ...]:
    return tuple(sorted(model.id for model in told.data if model.parent is not None)[:MAX_ADAPTERS])

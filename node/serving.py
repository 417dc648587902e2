"""Whether an engine answers over HTTP yet: one whose connector says Hello long before its API server listens."""

import asyncio
import logging
from typing import Final

import aiohttp

log = logging.getLogger(__name__)

POLL_S: Final = 0.25
ANSWER_S: Final = 10.0


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

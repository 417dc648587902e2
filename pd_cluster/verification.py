"""Whether a node's engine does what a role needs: a short prompt of the node's own, over the way that requests take.

The prompt is shorter than a block, so that it leaves nothing in any cache.
"""

import asyncio
from typing import Any, Final

import aiohttp
import msgspec

from node.role import Convertible
from transport.control.bounded import BodyTooLong, read_bounded
from transport.control.proto import node_pb2 as pb

PROMPT: Final = (1, 2, 3)  # token ids that every vocabulary has
POLL_S: Final = 0.02
MAX_ANSWER_BYTES: Final = 1 << 16
NO_ENGINE: Final = (pb.NODE_STATE_STARTING, pb.NODE_STATE_ENGINE_DOWN)


class VerificationFailed(Exception):
    """The engine answered, and not as it should."""


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Answer(msgspec.Struct):
    usage: _Usage = msgspec.field(default_factory=_Usage)


_ANSWER: Final = msgspec.json.Decoder(_Answer)


async def verify(node: Convertible) -> None:
    """Returns once the engine has answered; who awaits it says how long that may take.

    Raises VerificationFailed, aiohttp.ClientError, OSError.
    """
    while node.state() in NO_ENGINE:  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)  # one that died while the node drained is started again
    async with aiohttp.ClientSession() as session:
        await _complete(session, node.door.engine_url, node.config.model_name)


async def _complete(session: aiohttp.ClientSession, engine_url: str, model: str) -> None:
    body: dict[str, Any] = {"model": model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    async with session.post(f"{engine_url}/v1/completions", json=body) as response:
        try:
            data = await read_bounded(response.content.iter_any(), MAX_ANSWER_BYTES)
        except BodyTooLong as exc:
            raise VerificationFailed(f"its engine answered with {exc}") from exc
        if response.status != 200:
            raise VerificationFailed(f"its engine answered with {response.status}: {data[:200]!r}")
    try:
        answer = _ANSWER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise VerificationFailed(f"its engine's answer cannot be read: {exc}") from exc
    if answer.usage.completion_tokens != 1:
        raise VerificationFailed(f"its engine answered with {answer.usage.completion_tokens} tokens instead of one")

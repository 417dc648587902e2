"""Listens to the KV events that a server publishes over ZMQ: vLLM's (vllm.distributed.kv_events, as of 0.32) and SGLang's
(sglang.srt.disaggregation.kv_events, as of 0.5.23), which says the same in the same encoding.

A message is [topic, sequence number as 8 bytes big-endian, msgpack of [time, [events], data-parallel rank]].
"""

import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

import msgspec

from hybrid_cache.cache.events import CacheEvent
from node.engine.prefix_cache import EngineCache, EngineEvent

log = logging.getLogger(__name__)

EVENTS_SOCKET: Final = (
    "kv-events"  # beside the agent's own socket; engine.vllm.launch and engine.sglang.launch have servers bind it
)
MAX_QUEUED_MESSAGES: Final = 10_000  # more are dropped by ZMQ, which the sequence numbers tell


class _Batch(msgspec.Struct, array_like=True):
    time: float
    events: list[EngineEvent]
    data_parallel_rank: int | None = None


_decoder: Final = msgspec.msgpack.Decoder(_Batch)


def events_endpoint(agent_socket: Path) -> str:
    """Where the engine of the agent that listens on `agent_socket` publishes."""
    return f"ipc://{agent_socket.parent / EVENTS_SOCKET}"


async def follow(endpoint: str, cache: EngineCache, publish: Callable[[CacheEvent], None]) -> None:
    """Takes in one engine's events until cancelled."""
    async with _subscription(endpoint) as messages:
        await take_in(messages, cache, publish)


async def take_in(
    messages: AsyncIterator[list[bytes]], cache: EngineCache, publish: Callable[[CacheEvent], None]
) -> None:
    """Takes in messages as they come; what was lost on the way makes the cache begin anew."""
    expected = 0
    trouble, is_missed = "", False
    async for message in messages:
        try:
            _, number, payload = message
            batch = _decoder.decode(payload)
        except (ValueError, msgspec.MsgspecError, RecursionError) as exc:
            # Not taken in, so missing: as if ZMQ had lost it.
            if str(exc) != trouble:  # a server of a later release may say it at every step
                log.warning("engine's cache event not understood: %s", exc)
            trouble, is_missed = str(exc), True
            continue
        sequence = int.from_bytes(number, "big")
        changes: list[CacheEvent] = []
        if sequence != expected:
            if not is_missed:
                log.warning("engine's cache events lost: %d came after %d", sequence, expected - 1)
            changes += cache.clear()
        expected, is_missed = sequence + 1, False
        changes += cache.apply(batch.events)
        for change in changes:
            publish(change)


@contextlib.asynccontextmanager
async def _subscription(endpoint: str) -> AsyncIterator[AsyncIterator[list[bytes]]]:
    # Comes with vLLM and SGLang; a node of another engine needs it not.
    import zmq
    import zmq.asyncio

    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    try:
        socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
        socket.setsockopt(zmq.LINGER, 0)
        socket.subscribe(b"")
        socket.connect(endpoint)
        yield _messages(socket)
    finally:
        socket.close()
        context.term()


async def _messages(socket: "zmq.asyncio.Socket") -> AsyncIterator[list[bytes]]:  # type: ignore[name-defined] # noqa: F821
    while True:
        yield await socket.recv_multipart()

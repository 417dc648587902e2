"""Reads HTTP bodies whole, up to a limit: a broken or unknown peer must not fill memory."""

from collections.abc import AsyncIterable


class BodyTooLong(Exception):
    """More than `limit_bytes` came; the rest was not read."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"more than {limit_bytes} bytes")


async def read_bounded(chunks: AsyncIterable[bytes], limit_bytes: int) -> bytes:
    """A body that comes in chunks (of aiohttp: `answer.content.iter_any()`). Raises BodyTooLong, and what `chunks` does."""
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > limit_bytes:
            raise BodyTooLong(limit_bytes)
    return bytes(body)

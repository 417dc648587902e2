"""What stands for the transport between scripted nodes."""

import asyncio


class Fabric:
    """Transfers by id: unsettled, landed (with the tokens that the prefill reused) or given up (with a reason)."""

    def __init__(self) -> None:
        self._transfers: dict[str, asyncio.Future[str]] = {}

    def open(self, transfer_id: str) -> None:
        self._transfers[transfer_id] = asyncio.get_running_loop().create_future()

    def end(self, transfer_id: str, reason: str = "") -> None:
        future = self._transfers.get(transfer_id)
        if future is not None and not future.done():
            future.set_result(reason)

    async def landed(self, transfer_id: str) -> str:
        """ "" once the KVCache is there, else why it never will be."""
        future = self._transfers.get(transfer_id)
        return await asyncio.shield(future) if future else "unknown_transfer"

"""How long an event loop stands still, and what its thread spends."""

import asyncio
import time
from typing import Final

BEAT_S: Final = 0.001


class LoopMeter:
    """Pauses on the clock, turns in processor time of the loop's thread: a pause includes what others' work took."""

    def __init__(self) -> None:
        self.pause_s = self.turn_s = 0.0
        self.beats = 0

    async def run(self) -> None:
        """Until cancelled."""
        at, cpu = time.monotonic(), time.thread_time()
        while True:
            await asyncio.sleep(BEAT_S)
            now, spent = time.monotonic(), time.thread_time()
            self.pause_s = max(self.pause_s, now - at - BEAT_S)
            self.turn_s = max(self.turn_s, spent - cpu)
            self.beats += 1
            at, cpu = now, spent

    def reset(self) -> None:
        """Begins anew."""
        self.pause_s = self.turn_s = 0.0
        self.beats = 0

"""Work on a cache that takes long: one step in each turn of the event loop, one piece of work after the other."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence


class PacedWork:
    """Pieces of work, each of some request, in the order in which they came. There are a few to a reservation at most."""

    def __init__(self) -> None:
        self._pieces: deque[tuple[str, Iterator[None]]] = deque()
        self._waiting: Counter[str] = Counter()  # pieces by request

    def __contains__(self, request_id: str) -> bool:
        """Whether a piece of that request is not done yet."""
        return request_id in self._waiting

    def add(self, request_id: str, steps: Iterator[None]) -> None:
        """Does a piece of work after all that came before it. An error ends that piece, and is the loop's to report."""
        self._pieces.append((request_id, steps))
        self._waiting[request_id] += 1
        if len(self._pieces) == 1:
            self._later()

    async def settled(self) -> None:
        """Returns when all is done that there was to do when it was called."""
        if self._pieces:
            done = asyncio.Event()
            self.add("", once(done.set))
            await done.wait()

    def _later(self) -> None:
        asyncio.get_running_loop().call_soon(self._take_step)

    def _take_step(self) -> None:
        request_id, steps = self._pieces[0]
        is_over = True
        try:
            is_over = next(steps, self) is self
        finally:
            if is_over:
                self._pieces.popleft()
                self._waiting[request_id] -= 1
                if not self._waiting[request_id]:
                    del self._waiting[request_id]
            if self._pieces:
                self._later()


async def committed_alike(long: Mapping[str, bytes], hashes: Sequence[bytes], work: PacedWork) -> None:
    """Waits for what is still to be done for long prompts that begin as this one. `long` has the first block of each."""
    if any(first in hashes[:1] and request_id in work for request_id, first in long.items()):
        await work.settled()


def once(act: Callable[[], None]) -> Iterator[None]:
    """An act of one step."""
    yield from ()
    act()


def up_to(end: int, step: int, act: Callable[[int], None]) -> Iterator[None]:
    """An act that goes further each time, at last up to `end`."""
    for reached in range(step, end, step):
        act(reached)
        yield
    act(end)

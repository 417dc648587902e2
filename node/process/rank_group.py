"""A node as one of several that started together, whose engines compute each step together: ranks of one group.

An engine of such a group cannot go on without the others, and cannot join them again. So all start anew when one has ended, and
none ends in order before the last one has drained. Each of them counts each death of the group, once: so all give up at the same
one, after as many as an engine on its own. What a node says of its engine reaches the others through the process that
started them, over a socket each. A node on its own has no line.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final, Self

LINE_VARIABLE: Final = "PRFAAS_RANK_LINE"  # the number of the socket's descriptor
MOST_WORDS: Final = 64  # in one read

ENGINE_ENDED: Final = b"e"  # said by a node: its engine has ended by itself
STARTS_ANEW: Final = b"s"  # said by a node: its engine has ended for the others, or had ended already
DRAINED: Final = b"d"  # it has drained, and would end its engine
START_ANEW: Final = b"a"  # said to a node: end the engine, and start the next one
MAY_END: Final = b"m"  # all have drained
HEARD: Final = b"h"  # that its engine has ended by itself


class DeathsTold:
    """Tells a death of the group that this node has counted from one that it has not.

    Its engine may have ended by itself of what the others tell it of, and be there again when it hears that.
    """

    def __init__(self) -> None:
        self._unheard = 0

    def has_ended(self) -> None:
        """Its engine, by itself: that is said, and counted."""
        self._unheard += 1

    def was_heard(self) -> None:
        """What is told from now on was said after that."""
        self._unheard = max(0, self._unheard - 1)

    @property
    def is_counted(self) -> bool:
        """Whether a death that is told now is one of those that this node has said."""
        return self._unheard > 0


StartAnew = Callable[[bool], None]  # whether that death has been counted here


class RankGroup:
    """The other ranks, as this node hears of them and tells them."""

    def __init__(self, line: socket.socket | None) -> None:
        self._line = line
        self._may_end = asyncio.Event()
        self._deaths = DeathsTold()
        if line is None:
            self._may_end.set()
        else:
            line.setblocking(False)

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self:
        """The group that this process was started for."""
        number = environment.get(LINE_VARIABLE)
        if number is None:
            return cls(None)
        os.set_inheritable(int(number), False)
        return cls(socket.socket(fileno=int(number)))

    def listen(self, start_anew: StartAnew) -> None:
        """From now on an engine of another rank that has ended has this one's start anew."""
        if self._line is not None:
            asyncio.get_running_loop().add_reader(self._line, self._hear, self._line, start_anew)

    def engine_ended(self) -> None:
        """This node's engine has ended by itself."""
        self._deaths.has_ended()
        self._say(ENGINE_ENDED)

    async def drained(self) -> None:
        """Returns once all ranks have drained. At once for a node on its own."""
        self._say(DRAINED)
        await self._may_end.wait()

    def close(self) -> None:
        if self._line is not None:
            asyncio.get_running_loop().remove_reader(self._line)
            self._line.close()
            self._line = None
        self._may_end.set()

    def _say(self, word: bytes) -> None:
        if self._line is not None:
            with suppress(OSError):  # the process that started us is gone, and we are about to hear of that
                self._line.send(word)

    def _hear(self, line: socket.socket, start_anew: StartAnew) -> None:
        try:
            words = line.recv(MOST_WORDS)
        except BlockingIOError:
            return
        except OSError:
            words = b""
        for word in words:
            self._heard(bytes([word]), start_anew)
        if not words:
            self.close()

    def _heard(self, word: bytes, start_anew: StartAnew) -> None:
        if word == START_ANEW:
            start_anew(self._deaths.is_counted)
            self._say(STARTS_ANEW)
        elif word == HEARD:
            self._deaths.was_heard()
        elif word == MAY_END:
            self._may_end.set()

"""Ports that a node is to listen on, and which process has them while it cannot.

A node that is started again may come before its predecessor has let go: an agent that drains, an engine that is about to hear
that its agent is gone. The node waits for such a port. One that another program has is a mistake in the configuration.
"""

import asyncio
import errno
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from node.errors import NodeConfigError, PortHeld
from transport.path.tcp import format_address, listen

log = logging.getLogger(__name__)

POLL_S: Final = 0.1
LISTEN: Final = "0A"  # of /proc/net/tcp (Documentation/networking/proc_net_tcp.rst)
NODE_VARIABLE: Final = "PRFAAS_NODE"  # in an engine's environment: whose engine it is
UNUSABLE: Final = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES)


@dataclass(frozen=True, slots=True)
class ListenPort:
    """An address to listen on, and the key of the configuration that says so. Number 0 is any free one."""

    key: str
    host: str
    number: int

    def refused(self, exc: OSError) -> NodeConfigError:
        """An address that is not to be had is the fault of a key."""
        reason = os.strerror(exc.errno) if exc.errno else str(exc)
        return NodeConfigError(
            f"{self.key} = {self.number}: cannot listen on {format_address(self.host, self.number)}: {reason}"
        )


async def wait_free(port: ListenPort, node_id: str, timeout_s: float, now: Callable[[], float]) -> None:
    """Returns once `port` can be had. Raises NodeConfigError if a stranger has it, PortHeld if a predecessor does not let go."""
    deadline, told = now() + timeout_s, False
    while (refusal := _try(port)) is not None:
        pid = holder(port.number) if refusal.errno == errno.EADDRINUSE else None
        if pid is None or not is_predecessor(pid, node_id):
            if _try(port) is None:
                return  # it was let go just now
            raise port.refused(refusal) from refusal
        if now() >= deadline:
            raise PortHeld(f"{port.key} = {port.number}: pid {pid}, of this node's earlier run, still holds it")
        if not told:
            log.warning("%s = %d: waiting for pid %d, of this node's earlier run", port.key, port.number, pid)
            told = True
        await asyncio.sleep(POLL_S)


def _try(port: ListenPort) -> OSError | None:
    try:
        listen(port.host, port.number).close()
    except OSError as exc:
        if exc.errno not in UNUSABLE:
            raise
        return exc
    return None


def holder(number: int) -> int | None:
    """The process that listens on a TCP port, if it can be seen: one of this user's, or anybody's for root."""
    wanted = {f"socket:[{inode}]" for inode in _listening(number)}
    return next((pid for pid in _pids() if wanted and _has_open(pid, wanted)), None)


def is_predecessor(pid: int, node_id: str) -> bool:
    """Whether a process is this node's engine, or an agent that was started with this one's very command line.

    One that is ending has neither any more: its memory goes before its sockets, and gigabytes of it take a moment. It lets
    go in either case.
    """
    try:
        if not (command := Path(f"/proc/{pid}/cmdline").read_bytes()):
            return True
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    ours = pid != os.getpid() and command == Path("/proc/self/cmdline").read_bytes()
    return ours or f"{NODE_VARIABLE}={node_id}".encode() in environment


def _listening(number: int) -> Iterator[str]:
    """Inodes of sockets that listen on a port, whatever the address."""
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            words = line.split()
            if words[3] == LISTEN and int(words[1].rpartition(":")[2], 16) == number:
                yield words[9]


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _has_open(pid: int, wanted: set[str]) -> bool:
    # Of a process that is ending the first thread may have let go of everything, and others not yet.
    return _shows(f"/proc/{pid}", wanted) or any(_shows(f"/proc/{pid}/task/{each}", wanted) for each in _ending(pid))


def _shows(folder: str, wanted: set[str]) -> bool:
    return any(_target(f"{folder}/fd/{link}") in wanted for link in _entries(f"{folder}/fd"))


def _ending(pid: int) -> list[str]:
    """Threads of a process whose first one has ended."""
    return [] if _entries(f"/proc/{pid}/fd") else _entries(f"/proc/{pid}/task")


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # gone, or another user's
        return []


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""

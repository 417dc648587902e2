"""Machines as network namespaces on one switch: the frames of a switch's ports are what a wire would show.

home machines ── lan ports ── SWITCH ── wan port ── remote machines
"""

import ctypes
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Final, Self, TypeVar

T = TypeVar("T")

CLONE_NEWNET: Final = 0x40000000
PREFIX_BITS: Final = 16
BRIDGE: Final = "switch"
COMMAND_S: Final = 60.0


def why_not() -> str:
    """Why no namespace can be made here; "": they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]:
        return f"not installed: {', '.join(missing)}"
    tried = subprocess.run(
        ["unshare", "--net", "ip", "link", "add", BRIDGE, "type", "bridge"], capture_output=True, text=True, check=False
    )
    return f"no network namespace with a switch: {tried.stderr.strip()}" if tried.returncode else ""


class Machine:
    """A namespace that is there while a process of its own waits in it."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        # It ends at the end of its input: when we close it, and also when we die.
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "ip link set lo up && echo up && exec cat"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"up\n"

    @property
    def pid(self) -> int:
        return self._holder.pid

    @property
    def enter(self) -> list[str]:
        """What a command line begins with that runs there."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", "--"]

    def ip(self, *arguments: str) -> None:
        subprocess.run([*self.enter, "ip", *arguments], check=True)

    def inside(self, do: Callable[[], T]) -> T:
        """What `do` returns, called in a thread whose sockets are this machine's."""
        outcome: list[Callable[[], T]] = []

        def run() -> None:
            try:
                with open(f"/proc/{self.pid}/ns/net") as namespace:
                    if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), "setns")
                result = do()
                outcome.append(lambda: result)
            except BaseException as error:
                failure = error

                def fail() -> T:
                    raise failure

                outcome.append(fail)

        thread = threading.Thread(target=run, name=self.name)
        thread.start()
        thread.join()
        return outcome[0]()

    def socket(self, family: int, kind: int, protocol: int = 0) -> socket.socket:
        return self.inside(lambda: socket.socket(family, kind, protocol))

    def close(self) -> None:
        self._holder.communicate()


class Network:
    """A switch and the machines on it, by name."""

    def __init__(self, addresses: Mapping[str, str]) -> None:
        with ExitStack() as stack:
            self.switch = Machine("the switch", "")
            stack.callback(self.switch.close)
            self.switch.ip("link", "add", BRIDGE, "type", "bridge")
            self.switch.ip("link", "set", BRIDGE, "up")
            self.machines: dict[str, Machine] = {}
            for name, address in addresses.items():
                machine = self.machines[name] = Machine(name, address)
                stack.callback(machine.close)
                self._join(machine)
            self._stack = stack.pop_all()

    def _join(self, machine: Machine) -> None:
        port = f"p{len(self.machines)}"
        wire = ("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(machine.pid))
        self.switch.ip(*wire)
        self.switch.ip("link", "set", port, "master", BRIDGE, "up")
        machine.ip("addr", "add", f"{machine.address}/{PREFIX_BITS}", "dev", "eth0")
        machine.ip("link", "set", "eth0", "up")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()


def run(
    machine: Machine, command: Sequence[str], environment: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    """A command on a machine, to its end."""
    return subprocess.run(
        [*machine.enter, *command],
        capture_output=True, text=True, timeout=COMMAND_S, check=False, env={**os.environ, **environment},
    )  # fmt: skip

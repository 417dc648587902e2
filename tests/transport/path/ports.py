"""Ports for servers that must know theirs before they listen."""

import random
import socket
from pathlib import Path
from typing import Final

LOWEST: Final = 10_000
EPHEMERAL: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
TRIES: Final = 200


def free_port() -> int:
    """A port of loopback that is free now, and which the kernel gives to no socket that asks for any port."""
    ports = range(LOWEST, int(EPHEMERAL.read_text().split()[0]))
    if len(ports) < TRIES:  # nearly all ports are given to those that ask for any
        ports = range(LOWEST, 1 << 16)
    for port in random.Random().sample(ports, TRIES):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"none of {TRIES} ports is free")


def free_ports(count: int) -> list[int]:
    """So many, each another one."""
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port())
    return list(found)

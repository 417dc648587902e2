"""What systemd is told of a gateway (sd_notify(3)). Without systemd nothing is told."""

import logging
import socket
from collections.abc import Mapping
from typing import Final

log = logging.getLogger("prfaas.gateway.systemd")

READY: Final = "READY=1"
STOPPING: Final = "STOPPING=1"
VARIABLE: Final = "NOTIFY_SOCKET"


def main_process(pid: int) -> str:
    """That another process is the service's main one from now on."""
    return f"MAINPID={pid}"


def notify(environment: Mapping[str, str], *lines: str) -> None:
    """Tells systemd, if it started this process."""
    address = environment.get(VARIABLE, "")
    if not address:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
            connection.setblocking(False)
            connection.sendto(
                "\n".join(lines).encode(), address.replace("@", "\0", 1) if address[0] == "@" else address
            )
    except OSError as error:
        log.warning("systemd does not hear %r: %s", lines, error)

"""What can happen to the guest's rails (see guest-network), and how it is undone."""

import json
import subprocess
from contextlib import suppress

NETS = {"a": 1, "b": 2}


def unplug(netdev: str) -> None:
    _run("ip", "link", "set", netdev, "down")


def swallow(netdev: str) -> None:
    """Silently loses every packet that leaves by it."""
    _run("tc", "qdisc", "replace", "dev", netdev, "root", "netem", "loss", "100%")


def mend_all() -> None:
    for rail, net in NETS.items():
        for end in (0, 1):
            netdev = f"n{rail}{end}"
            with suppress(subprocess.CalledProcessError):  # there was none
                _run("tc", "qdisc", "del", "dev", netdev, "root")
            _run("ip", "link", "set", netdev, "up")
        for end in (0, 1):  # they went with the link
            mine, theirs = f"10.77.{net}.{end + 1}", f"10.77.{net}.{2 - end}"
            _run("ip", "route", "replace", f"{theirs}/32", "dev", f"n{rail}{end}", "src", mine, "table", "77")


def resources() -> dict[str, dict[str, int]]:
    """Queue pairs, regions and the like that exist in the kernel, by device."""
    listed = json.loads(_run("rdma", "-j", "resource", "show"))
    return {entry["ifname"]: {k: v for k, v in entry.items() if k in ("qp", "cq", "mr", "pd")} for entry in listed}


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout

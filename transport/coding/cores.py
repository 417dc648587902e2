"""How many cores this process may use: those that it may run on, and no more time than its control groups allow."""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

GROUPS: Final = Path("/sys/fs/cgroup")
OWN_GROUPS: Final = Path("/proc/self/cgroup")


def usable_cores(runs_on: int | None = None, own_groups: Path = OWN_GROUPS, groups: Path = GROUPS) -> float:
    """A container of half a core has 0.5. `runs_on` are the cores that it may run on, as the kernel says by default."""
    allowed = [float(runs_on or len(os.sched_getaffinity(0)))]
    for group in _groups(own_groups, groups):
        if (quota := _quota(group)) is not None:
            allowed.append(quota)
    return min(allowed)


def _groups(own_groups: Path, groups: Path) -> Iterator[Path]:
    """The folders of all groups that the process is in, from the innermost to the root, of both versions.

    A container may see its own group as the root, while it is told the path that the host has for it.
    """
    for line in _text(own_groups).splitlines():
        _, controllers, name = line.split(":", 2)
        if not controllers:
            root = groups
        elif "cpu" in controllers.split(","):
            root = groups / controllers
            root = root if root.is_dir() else groups / "cpu"
        else:
            continue
        inside = PurePosixPath(name.lstrip("/"))
        for each in (inside, *inside.parents):
            yield root / each


def _quota(group: Path) -> float | None:
    """Cores' worth of time that a group allows; None: no limit, or none that can be read."""
    quota, period = _text(group / "cpu.max").split() or (
        _text(group / "cpu.cfs_quota_us").strip(), _text(group / "cpu.cfs_period_us").strip()
    )  # fmt: skip
    if not (quota.isdigit() and period.isdigit() and int(quota) and int(period)):
        return None
    return int(quota) / int(period)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

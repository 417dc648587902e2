"""Becomes another program that ends with its parent: `python launcher.py PARENT_PID SIGNAL COMMAND...`.

A script of its own, run isolated and without site-packages: what a child has to do before it is the program is done here, after
an exec, so that its parent needs no fork. A forked copy of a process with threads (gRPC's among them) may crash before its exec.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # prctl(2): the signal comes when the thread that started this process ends; it survives exec
STATUS_CANNOT_EXEC = 127  # as shells have it


def main(parent: int, number: int, command: list[str]) -> int:
    """Returns only if `command` cannot be run."""
    if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number) != 0:
        print("cannot ask for a signal at the parent's death", file=sys.stderr)
    if os.getppid() != parent:  # it died before we asked
        return 128 + number
    # What is ignored stays so over exec: Python ignores SIGPIPE, and a parent that is ending may ignore SIGTERM.
    for each in (signal.SIGPIPE, signal.SIGTERM):
        signal.signal(each, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as exc:
        print(f"{command[0]}: {exc.strerror}", file=sys.stderr)
    return STATUS_CANNOT_EXEC


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))

"""A parser that says in two lines what is wrong with a command line, and what was meant."""

import argparse
import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

CHOICE = re.compile(r"invalid choice: '(?P<given>[^']*)' \(choose from (?P<known>.*)\)")


class CommandParser(argparse.ArgumentParser):
    """For a command and, as argparse makes them of the same class, its subcommands."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:  # type: ignore[override]
        """Arguments that a subcommand does not know are its own mistake, not that of the command above it."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._meant_flag(unknown[0])}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """Without the usage, which takes up to forty lines, and would hide the message."""
        self.exit(
            2, f"{self.prog}: error: {message}{_meant_choice(message)}\n{self.prog} --help shows all arguments.\n"
        )

    def _meant_flag(self, given: str) -> str:
        known = set(re.findall(r"--[a-z][a-z-]+", self.format_usage()))
        return _meant(given.partition("=")[0], sorted(known))


def _meant_choice(message: str) -> str:
    found = CHOICE.search(message)
    return _meant(found["given"], re.findall(r"'([^']*)'", found["known"])) if found else ""


def _meant(given: str, known: Sequence[str]) -> str:
    near = get_close_matches(given, known, n=1, cutoff=0.75)
    return f" (did you mean {near[0]!r}?)" if near else ""

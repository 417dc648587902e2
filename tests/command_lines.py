"""What `--help` prints."""

import re

ARGUMENT = re.compile(
    r" {2,4}\S+( \S+)*"
)  # as argparse indents them; its help follows after two spaces, or in the next line
HELP = re.compile(r" {4,}\S")  # in the next line, or a list of subcommands


def unexplained(text: str) -> list[str]:
    """The arguments, in what argparse prints, that have no help."""
    lines = text.partition("\n\n")[2].splitlines()
    return [
        line.strip()
        for line, after in zip(lines, [*lines[1:], ""], strict=True)
        if ARGUMENT.fullmatch(line) and not line.strip().startswith("{") and not HELP.match(after)
    ]

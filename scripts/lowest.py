"""The lowest version that pyproject.toml allows of each dependency, as pip's constraints: `python scripts/lowest.py EXTRA …`."""

import re
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
RANGE = re.compile(r"(?P<name>[\w.-]+)>=(?P<lowest>[\w.]+),<[\w.]+")


def lowest(*extras: str) -> list[str]:
    """One line for each dependency. Raises ValueError if one is not a range, KeyError if there is no such extra."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    ranges = [*project["dependencies"]]
    for extra in extras:
        ranges += project["optional-dependencies"][extra]
    lines = []
    for each in ranges:
        match = RANGE.fullmatch(each)
        if match is None:
            raise ValueError(f"{each} is not a range: NAME>=LOWEST,<NEXT")
        lines.append(f"{match['name']}=={match['lowest']}")
    return lines


if __name__ == "__main__":
    print("\n".join(lowest(*sys.argv[1:])))

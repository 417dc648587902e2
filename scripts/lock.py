"""Writes the exact versions of each environment: `python scripts/lock.py [dev|clients|docs|load|schema] …` (`make lock`).

A lock is a file of constraints: pip installs what pyproject.toml names, in the versions that the lock names. What only another
platform or another build of torch needs is not in it, and is resolved there.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
LOCKS: Final = ROOT / "requirements"
EXTRAS: Final = "embedded,fast,oidc,otlp,planner,plots,zstd"  # as `make setup` installs them
WANTED: Final = {
    "dev": ["--editable", f".[{EXTRAS}]", "--group", "dev"],
    "clients": ["--group", "clients"],
    "docs": ["--group", "docs"],
    "load": ["--group", "load"],
    "schema": ["--group", "schema"],
}


def resolve(wanted: list[str]) -> list[str]:
    """The newest versions that fit each other, one line for each. Raises CalledProcessError if none do."""
    asked = ["install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-", *wanted]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *asked], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    found = [each["metadata"] for each in json.loads(done.stdout)["install"]]
    # A local version, as torch's +cpu, is a build of the same version.
    lines = {each["name"].lower().replace("_", "-"): each["version"].partition("+")[0] for each in found}
    return [f"{name}=={version}" for name, version in sorted(lines.items()) if name != "prfaas"]


def main(names: list[str]) -> None:
    for name in names or WANTED:
        lines = resolve(WANTED[name])
        heading = "# Written by `make lock`: the versions that are installed and tested.\n"
        (LOCKS / f"{name}.lock").write_text(heading + "".join(f"{line}\n" for line in lines))
        print(f"requirements/{name}.lock: {len(lines)} packages")


if __name__ == "__main__":
    main(sys.argv[1:])

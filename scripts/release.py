"""Builds, checks and tags a release: `python scripts/release.py VERSION` (`make release VERSION=0.1.0`). Publishes nothing.

It leaves the wheel, the source distribution and NOTES-VERSION.md in dist/. An obstacle ends it with status 1 and one line.
"""

import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
DIST: Final = ROOT / "dist"
SECTION: Final = re.compile(r"^## \[(?P<version>[^\]]+)\](?: - (?P<date>\d{4}-\d{2}-\d{2}))?$", re.MULTILINE)
COMMANDS: Final = ("prfaas", "prfaas-plan")


class ReleaseError(Exception):
    """What stands in the way of a release."""


def sections(changelog: str) -> dict[str, tuple[str | None, str]]:
    """By version, newest first: its date, and what stands below its heading."""
    headings = list(SECTION.finditer(changelog))
    ends = [heading.start() for heading in headings[1:]] + [len(changelog)]
    return {
        heading["version"]: (heading["date"], changelog[heading.end() : end].strip())
        for heading, end in zip(headings, ends, strict=True)
    }


def notes(changelog: str, version: str) -> str:
    """What the changelog says of a version. Raises ReleaseError where its section is missing, undated or empty."""
    date, text = sections(changelog).get(version, (None, ""))
    if date is None:
        raise ReleaseError(f"CHANGELOG.md has no section `## [{version}] - YYYY-MM-DD`")
    if not text:
        raise ReleaseError(f"CHANGELOG.md says nothing of {version}")
    return f"# prfaas {version}\n\n{text}\n"


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def check_tree(version: str) -> None:
    """Raises ReleaseError unless the tree is clean, of this version, and not yet tagged."""
    said = re.search(r'__version__ = "(.+)"', (ROOT / "prfaas" / "__init__.py").read_text())
    if said is None or said[1] != version:
        raise ReleaseError(f"prfaas/__init__.py says {said and said[1]}, not {version}")
    if git("status", "--porcelain"):
        raise ReleaseError("the work tree has changes that are not committed")
    if git("tag", "--list", version):
        raise ReleaseError(f"tag {version} is there already")


def check_wheel(wheel: Path, version: str) -> None:
    """Raises ReleaseError unless the wheel has the version, the licence, both commands, and packages of the product alone."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = f"prfaas-{version}.dist-info"
        metadata = message_from_bytes(archive.read(f"{info}/METADATA"))
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
    if metadata["Version"] != version or metadata["License-Expression"] != "Apache-2.0":
        raise ReleaseError(f"{wheel.name} says version {metadata['Version']}, licence {metadata['License-Expression']}")
    if f"{info}/licenses/LICENSE" not in names:
        raise ReleaseError(f"{wheel.name} has no LICENSE")
    if missing := [name for name in COMMANDS if f"{name} = " not in entry_points]:
        raise ReleaseError(f"{wheel.name} has no command {', '.join(missing)}")
    if strange := {name.split("/")[0] for name in names} & {
        "tests",
        "benchmarks",
        "scripts",
        "docs",
        "deploy",
        "examples",
    }:
        raise ReleaseError(f"{wheel.name} has {', '.join(sorted(strange))}, which only a checkout should have")
    if exact := [each for each in metadata.get_all("Requires-Dist", []) if "==" in each.split(";")[0]]:
        raise ReleaseError(f"{wheel.name} wants exact versions: {', '.join(exact)}")


def check_sdist(sdist: Path) -> None:
    """Raises ReleaseError unless the source distribution has what a reader builds and tests with, and no environment."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "Makefile", "requirements/dev.lock"}
    if missing := wanted - names:
        raise ReleaseError(f"{sdist.name} lacks {', '.join(sorted(missing))}")
    if strange := [name for name in names if name.startswith((".venv", ".git/")) or name.endswith(".pyc")]:
        raise ReleaseError(f"{sdist.name} has {strange[0]}")


def build() -> None:
    """Builds the source distribution and, from it, the wheel."""
    for old in DIST.glob("prfaas-*"):
        old.unlink()
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(DIST), str(ROOT)], check=True, stdout=subprocess.PIPE
    )


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: make release VERSION=0.1.0", file=sys.stderr)
        return 2
    (version,) = arguments
    try:
        text = notes((ROOT / "CHANGELOG.md").read_text(), version)
        check_tree(version)
        build()
        check_wheel(DIST / f"prfaas-{version}-py3-none-any.whl", version)
        check_sdist(DIST / f"prfaas-{version}.tar.gz")
    except ReleaseError as exc:
        print(f"release: {exc}", file=sys.stderr)
        return 1
    file = DIST / f"NOTES-{version}.md"
    file.write_text(text)
    git("tag", "--annotate", version, "--message", f"prfaas {version}")
    print(
        f"dist/ has wheel, source distribution and {file.name}; the commit is tagged {version}. Nothing is published."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

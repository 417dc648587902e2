"""The version of SGLang that both backends were run against."""

from typing import Final

TESTED_VERSIONS: Final = ("0.5.23",)


def is_tested(version: str) -> bool:
    """Whether the backends have been run against this version, or one that is made of it (0.5.23.post1)."""
    return any(version == tested or version.startswith((f"{tested}.", f"{tested}+")) for tested in TESTED_VERSIONS)


def untested(version: str) -> str:
    """The warning about a version that is not tested."""
    return (
        f"SGLang {version} has not been tested with these backends (tested: {', '.join(TESTED_VERSIONS)}); "
        "its interface changes between versions, see docs/guides/sglang.md"
    )

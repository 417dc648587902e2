"""The versions of vLLM that the connector was run with; its base class is called experimental there, and changes."""

from typing import Final

TESTED_VERSIONS: Final = (
    "0.32",
    "0.33",
    "0.31",
)  # with any patch release; docs/guides/vllm.md says how much was run of each


def is_tested(version: str) -> bool:
    """Whether the connector has been run with this version of vLLM."""
    return any(version == tested or version.startswith(f"{tested}.") for tested in TESTED_VERSIONS)


def untested(version: str) -> str:
    """The warning about a version that is not tested."""
    return (
        f"vLLM {version} has not been tested with this connector (tested: {', '.join(TESTED_VERSIONS)}.x); "
        "its interface changes between versions, see docs/guides/vllm.md"
    )


def release(version: str) -> str:
    """The part of a version that says how KVCache lies in blocks: patches of a release keep to it."""
    return ".".join(version.split(".")[:2])

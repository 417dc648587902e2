"""Finds a file of a repository in the Hugging Face cache, if it was downloaded before. It uses no network. The cache's
layout is documented (huggingface_hub, "Understand caching"). This module reads it as
`huggingface_hub.try_to_load_from_cache` does, without its import, which would delay every start.
"""

from collections.abc import Mapping
from os.path import expanduser, expandvars
from pathlib import Path
from typing import Final

DEFAULT_REVISION: Final = "main"
MAX_COMMIT_BYTES: Final = 256  # of a file that says which commit a branch or tag was


def cached_file(repository: str, revision: str, name: str, environment: Mapping[str, str]) -> Path | None:
    """The file `name` of `repository` as it was at `revision` (a commit, a branch, a tag; "": the main branch). None: not cached.

    What a branch is now may be another commit than the one that was downloaded last.
    """
    folder = _cache(environment) / "--".join(["models", *repository.split("/")])
    commit = _commit(folder / "refs" / (revision or DEFAULT_REVISION)) or revision
    found = folder / "snapshots" / commit / name
    return found if commit and found.is_file() else None


def _cache(environment: Mapping[str, str]) -> Path:
    home = environment.get("XDG_CACHE_HOME", "~/.cache")
    hub = environment.get("HF_HOME", f"{home}/huggingface") + "/hub"
    return Path(expandvars(expanduser(environment.get("HF_HUB_CACHE", environment.get("HUGGINGFACE_HUB_CACHE", hub)))))


def _commit(reference: Path) -> str:
    """Which commit a branch or tag was when it was last downloaded; "" if it never was."""
    if not reference.is_file() or reference.stat().st_size > MAX_COMMIT_BYTES:
        return ""
    return reference.read_text().strip()

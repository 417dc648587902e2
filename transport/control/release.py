"""Names the code that a process runs: the distribution's version, and a digest of the sources.

Between two releases, and in a changed checkout, many states of the code have one version.
"""

import hashlib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

SITE: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = (
    "engine", "gateway", "hybrid_cache", "membership", "node", "pd_cluster", "planner", "prfaas", "prfaas_cluster",
    "prompts", "transport",
)  # fmt: skip
DIGITS: Final = 10


@cache
def release() -> str:
    """As `1.2.3+0a1b2c3d4e`; equal for processes that run the same code."""
    try:
        number = version("prfaas")
    except PackageNotFoundError:
        number = "unknown"
    return f"{number}+{digest_of(SITE)}"


def digest_of(site: Path) -> str:
    """The digest of the packages' sources below `site`."""
    digest = hashlib.sha256()
    sources = (path for name in PACKAGES for path in (site / name).rglob("*.py"))
    # Editors lock a file by a link that points nowhere (`.#agent.py`).
    for name in sorted(path.relative_to(site).as_posix() for path in sources if path.is_file()):
        content = (site / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:DIGITS]

"""The name of a vLLM server's KVCache: its weights, and every setting that its bytes depend on. Two servers that differ
in any of it have different layouts. Different layouts never pair, because KVCache of one would give wrong tokens in the
other. Weights that cannot be told apart are refused at the start.
"""

import dataclasses
import enum
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from engine.agent.identity import DigestMemory, identity_of, model_identity
from engine.errors import ModelError
from hybrid_cache.errors import LayoutError

# Where a configuration lies, and what loading notes in it: not the model's.
HF_PLACES: Final = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


def kv_identity(
    source: str, commit: str, facts: Mapping[str, str], *, revision: str = "", memory: DigestMemory | None = None
) -> str:
    """The name of a server's KVCache.

    `source` is a directory, one weight file, or a name that vLLM downloads by: then `commit` says what was downloaded. `facts`:
    settings by name. `revision`: the operator's word for the weights. `memory`: see `engine.agent.identity.model_identity`.
    Raises LayoutError where neither bytes nor a commit are known: a name or a branch may be other weights tomorrow.
    """
    path = Path(source)
    try:
        if path.is_dir():
            return model_identity(path, facts=facts, revision=revision, memory=memory)
        if path.is_file():
            return identity_of("file", {**facts, "file": "" if revision else _digest(path), "revision": revision})
    except (ModelError, OSError) as exc:
        raise LayoutError(str(exc)) from exc
    if not revision and _COMMIT.fullmatch(commit) is None:
        raise LayoutError(
            f"cannot tell which weights {source!r} names: give a directory, model_revision, or a commit as --revision"
        )
    return identity_of(path.name, {**facts, "source": source, "commit": commit, "revision": revision})


def with_forms(identity: str, forms: Sequence[str]) -> str:
    """`forms`: what recurrent states consist of, readable in the layout's name."""
    return "/".join([identity, "vllm", *forms])


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def text_of(value: Any) -> str:
    """A value as text that is equal in other processes, whatever it is."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(f"{key}: {text_of(value[key])}" for key in sorted(value, key=str) if key not in HF_PLACES)
            + "}"
        )
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(text_of, value))) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(text_of, value)) + "]"
    if hasattr(value, "to_dict"):  # a PreTrainedConfig
        return text_of(value.to_dict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return text_of({field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)})
    if isinstance(value, type) or callable(value):
        return f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    text = str(value)
    return text if " at 0x" not in text else f"{type(value).__module__}.{type(value).__qualname__}"

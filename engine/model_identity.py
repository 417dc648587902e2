"""What names a model's KVCache: equal for copies of a model directory, different for other weights."""

import hashlib
from pathlib import Path
from typing import Final

import msgspec

from engine.errors import ModelError

_SAMPLE_BYTES: Final = 1 << 20


def model_identity(directory: Path) -> str:
    """Name and digest of configuration and weights: equal for copies of a model, different for another seed."""
    config = directory / "config.json"
    try:
        kind = msgspec.json.decode(config.read_bytes()).get("model_type", "model")
    except (OSError, msgspec.DecodeError, AttributeError) as exc:
        raise ModelError(f"{config} cannot be read: {exc}") from exc
    digest = hashlib.sha256(config.read_bytes())
    for weights in sorted([*directory.glob("*.safetensors"), *directory.glob("*.bin")]):
        digest.update(f"{weights.name}:{weights.stat().st_size}".encode())
        digest.update(_sample(weights))
    return f"{kind}-{digest.hexdigest()[:16]}"


def _sample(path: Path) -> bytes:
    """Start, middle and end of a weight file: enough to tell models apart, cheap for large ones."""
    size = path.stat().st_size
    with path.open("rb") as file:
        parts = []
        for start in (0, max(0, size // 2 - _SAMPLE_BYTES // 2), max(0, size - _SAMPLE_BYTES)):
            file.seek(start)
            parts.append(file.read(_SAMPLE_BYTES))
    return b"".join(parts)

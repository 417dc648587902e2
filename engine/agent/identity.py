"""The name of a model's KVCache: equal for copies of a model, different as soon as one byte differs.

Two models under one name would decode each other's KVCache, into wrong tokens, unnoticed. So every byte counts:
weights, configuration, quantisation, code and tokenizer; only what is hidden or prose (`*.md`) does not. It uses
SHA-256 instead of a faster checksum: fine-tunes come from others, and no file may imitate another. A few threads
hash pieces of files, and each file once. The digests are kept on disk under the file's path and stamp.

    identity = kind - SHA-256( (name, size, SHA-256 of the pieces' SHA-256) of every file | facts )
"""

import functools
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from engine.errors import ModelError

log = logging.getLogger(__name__)

PIECE_BYTES: Final = 16 << 20  # what a thread reads at once
HASHING_THREADS: Final = 4
DIGEST_CHARS: Final = 32  # 128 bits of the digest: names stay readable, and no two models of this world share one
# A file that was written to this recently may be written to again without its times moving on (git's racy entries).
SETTLED_NS: Final = 2_000_000_000
MAX_REMEMBERED_FILES: Final = 4096
NO_FACTS: Final[Mapping[str, str]] = {}

WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".h5", ".msgpack", ".onnx")
PROSE: Final = (".md",)


class FileStamp(msgspec.Struct, frozen=True, array_like=True):
    """A file as the file system knows it. `ctime_ns` moves with every write, whatever a copying tool sets `mtime_ns` to."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


class ModelFile(msgspec.Struct, frozen=True):
    """One file of a model directory: `name` is its path in there, with slashes."""

    name: str
    path: str
    stamp: FileStamp

    @property
    def is_weights(self) -> bool:
        return self.name.endswith(WEIGHTS)


def model_identity(
    directory: Path, *, facts: Mapping[str, str] = NO_FACTS, revision: str = "", memory: "DigestMemory | None" = None
) -> str:
    """The name of a model directory's KVCache: model type and digest, as "kimi_linear-0123…".

    `facts` are other settings that change KVCache, by name (quantisation, LoRA, overrides, flags of another engine).
    Any difference is another identity. `revision` is the operator's word for the weights, whose contents are not read
    then; their names and sizes, and all other files, still count. `memory` keeps digests, so that a weight file is read
    once. Reads every byte otherwise: call it beside loading, not before. Raises ModelError, also when a file changes
    meanwhile.
    """
    files = model_files(directory)
    kind = model_type(directory)
    known = memory or DigestMemory(None)
    contents = [
        (file.name, file.stamp.size, "" if revision and file.is_weights else digest)
        for file, digest in _digests(files, known, skip=lambda file: bool(revision) and file.is_weights)
    ]
    if model_files(directory) != files:
        raise ModelError(f"{directory} changed while it was read: start again when it is complete")
    known.save()
    log.info("identity of %s: %d files, %d bytes hashed now", directory, len(files), known.hashed_bytes)
    return identity_of(kind, {**facts, "files": msgspec.json.encode(contents).decode(), "revision": revision})


def identity_of(kind: str, facts: Mapping[str, str]) -> str:
    """`kind` and a digest of everything in `facts`: for a model that is no directory, say a name with a revision."""
    digest = hashlib.sha256(msgspec.json.encode(sorted(facts.items()))).hexdigest()
    return f"{kind}-{digest[:DIGEST_CHARS]}"


def model_files(directory: Path) -> tuple[ModelFile, ...]:
    """Everything in a model directory that could matter, by name. Raises ModelError."""
    try:
        files = [_model_file(directory, path) for path in _walk(directory, set())]
    except OSError as exc:
        raise ModelError(f"{directory} cannot be read: {exc}") from exc
    return tuple(sorted(files, key=lambda file: file.name))


class DigestMemory:
    """Digests of files seen before, kept in one file: a checksum, then JSON. Without a path it remembers nothing.

    Damage to the file, or a disk without room, costs time only. A file that was written to less than `settled_ns` ago is not
    remembered.
    """

    def __init__(self, path: Path | None, settled_ns: int = SETTLED_NS) -> None:
        self._path = path
        self._settled_ns = settled_ns
        self._known: dict[str, tuple[FileStamp, str]] = _remembered(path) if path is not None else {}
        self._new: dict[str, tuple[FileStamp, str]] = {}
        self.hashed_bytes = 0

    def get(self, file: ModelFile) -> str | None:
        stamp, digest = self._known.get(file.path, (None, ""))
        return digest if stamp == file.stamp else None

    def put(self, file: ModelFile, digest: str, now_ns: int) -> None:
        """`now_ns` is the time at which reading began, on the file system's clock."""
        self.hashed_bytes += file.stamp.size
        if now_ns - max(file.stamp.mtime_ns, file.stamp.ctime_ns) >= self._settled_ns:
            self._new[file.path] = (file.stamp, digest)

    def save(self) -> None:
        """Adds the new digests to the file's present ones. A disk error is not a failure."""
        if self._path is None or not self._new:
            return
        known = {path: entry for path, entry in _remembered(self._path).items() if path not in self._new}
        newest = dict(list({**known, **self._new}.items())[-MAX_REMEMBERED_FILES:])
        try:
            _write(self._path, _sealed(msgspec.json.encode(newest)))
        except OSError as exc:
            log.warning("digests of model files are not kept in %s: %s", self._path, exc)


def default_memory() -> DigestMemory:
    """The digests that a user's processes share, at the place of the XDG base directory specification."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return DigestMemory(Path(base) / "prfaas" / "model-digests")


def _digests(
    files: Iterable[ModelFile], known: DigestMemory, skip: Callable[[ModelFile], bool]
) -> Iterator[tuple[ModelFile, str]]:
    with ThreadPoolExecutor(HASHING_THREADS, thread_name_prefix="identity") as pool:
        for file in files:
            digest = "" if skip(file) else known.get(file)
            if digest is None:
                began_ns = time.time_ns()  # compared with times of files
                digest = _digest(file, pool)
                known.put(file, digest, began_ns)
            yield file, digest


def _digest(file: ModelFile, pool: ThreadPoolExecutor) -> str:
    try:
        with _opened(file) as fd:
            pieces = pool.map(
                functools.partial(_piece_digest, fd, file.stamp.size), range(0, file.stamp.size, PIECE_BYTES)
            )
            return hashlib.sha256(b"".join(pieces)).hexdigest()
    except OSError as exc:
        raise ModelError(f"{file.path} cannot be read: {exc}") from exc


@contextmanager
def _opened(file: ModelFile) -> Iterator[int]:
    """A descriptor of the very file that was listed, at both ends of the block. Raises OSError, ModelError."""
    fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
        if _stamp(os.fstat(fd)) != file.stamp:
            raise ModelError(f"{file.path} changed while it was read: start again when it is complete")
    finally:
        os.close(fd)


def _piece_digest(fd: int, size: int, start: int) -> bytes:
    digest, at, stop = hashlib.sha256(), start, min(start + PIECE_BYTES, size)
    while at < stop and (data := os.pread(fd, stop - at, at)):
        digest.update(data)
        at += len(data)
    return digest.digest()


def model_type(directory: Path) -> str:
    """The architecture that config.json names. Raises ModelError."""
    config = directory / "config.json"
    try:
        return str(msgspec.json.decode(config.read_bytes()).get("model_type", "model"))
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, AttributeError) as exc:
        raise ModelError(f"{config} cannot be read: {exc}") from exc


def num_layers(directory: Path) -> int | None:
    """How many layers config.json says a model has, where it says so under the usual names."""
    try:
        config = msgspec.json.decode((directory / "config.json").read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    found = config.get("num_hidden_layers") or (config.get("text_config") or {}).get("num_hidden_layers")
    return found if isinstance(found, int) else None


def _walk(directory: Path, above: set[tuple[int, int]]) -> Iterator[Path]:
    """Files in `directory` and below, links followed, but not in a circle."""
    here = directory.stat()
    if (here.st_dev, here.st_ino) in above:
        return
    for path in directory.iterdir():
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from _walk(path, above | {(here.st_dev, here.st_ino)})
        elif path.is_file() and not path.name.endswith(PROSE):
            yield path


def _model_file(directory: Path, path: Path) -> ModelFile:
    real = path.resolve()  # shards of a hub's cache are links
    return ModelFile(path.relative_to(directory).as_posix(), str(real), _stamp(real.stat()))


def _stamp(status: os.stat_result) -> FileStamp:
    return FileStamp(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _remembered(path: Path) -> dict[str, tuple[FileStamp, str]]:
    """The contents of a memory file; empty if it is missing or damaged."""
    try:
        data = path.read_bytes()
        body = data.partition(b"\n")[2]
        if data != _sealed(body):
            return {}
        return msgspec.json.decode(body, type=dict[str, tuple[FileStamp, str]])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}


def _sealed(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def _write(path: Path, data: bytes) -> None:
    """Writes all or nothing, also beside other writers. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise

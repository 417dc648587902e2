"""Adds a node to a file of members, or removes one: the rest of the file stays as it is, comments and all."""

import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from membership.documents import read_members, told, toml_block
from membership.errors import EditRefused
from membership.member import Member
from transport.control.settings import MAX_FILE_BYTES, SettingsError

TABLE: Final = re.compile(r"[ \t]*\[(?![ \t]*nodes[ \t]*\.)")  # [nodes.labels] belongs to its node
NODE: Final = re.compile(r"^[ \t]*\[\[[ \t]*nodes[ \t]*\]\]", re.MULTILINE)
NEW_MODE: Final = 0o644
LOCK_TRIES: Final = 100
LOCK_PAUSE_S: Final = 0.05


def listed(path: Path) -> Sequence[Member]:
    """What the file lists. Raises EditRefused."""
    return _members(_text(path), path)


def add(path: Path, member: Member) -> None:
    """Lists one more node; a file that is not there is begun. Raises EditRefused."""
    with _alone(path):
        text = _text(path) if path.exists() else ("" if path.suffix == ".toml" else '{"nodes": []}')
        before = _members(text, path)
        for known in before:
            if known.id == member.id:
                raise EditRefused(f"{path} has {member.id} already, at {known.agent}; remove it first")
            if known.agent == member.agent:
                raise EditRefused(f"{path} has {member.agent} already, as {known.id}")
        if path.suffix == ".toml":
            wanted = "\n\n".join(part for part in (text.rstrip("\n"), toml_block(member)) if part)
        else:
            wanted = _json_with(text, [*_tables(text, path), told(member)])
        _replace(path, wanted, (*before, member))


def remove(path: Path, node: str) -> Member:
    """Lists a node no longer, named by its id or its agent's address; returns what it was. Raises EditRefused."""
    with _alone(path):
        text = _text(path)
        before = _members(text, path)
        index = next((index for index, each in enumerate(before) if node in (each.id, each.agent)), None)
        if index is None:
            known = ", ".join(each.id for each in before) or "none"
            raise EditRefused(f"{path} has no {node}; it lists {known}")
        if len(before) == 1:
            raise EditRefused(f"{node} is the last node of {path}: gateways keep the last one, so stop them instead")
        if path.suffix == ".toml":
            wanted = _without(text, index)
        else:
            tables = _tables(text, path)
            wanted = _json_with(text, [*tables[:index], *tables[index + 1 :]])
        _replace(path, wanted, [*before[:index], *before[index + 1 :]])
    return before[index]


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """No other command changes a file of this folder meanwhile."""
    try:
        folder = os.open(path.resolve().parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise EditRefused(f"{path}: {error.strerror or error}") from error
    try:
        _lock(folder, path)
        yield
    finally:
        os.close(folder)


def _lock(folder: int, path: Path) -> None:
    for _ in range(LOCK_TRIES):
        with suppress(BlockingIOError):
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(LOCK_PAUSE_S)
    raise EditRefused(f"{path}: another command has been changing files beside it for {LOCK_TRIES * LOCK_PAUSE_S:g} s")


def _without(text: str, index: int) -> str:
    """The text without the table of a node. Comments right before the next table belong to that one."""
    begin = [found.start() for found in NODE.finditer(text)][index : index + 1]
    if not begin:
        return text
    rest = text[begin[0] :].splitlines(keepends=True)[1:]
    length = next((number for number, line in enumerate(rest) if TABLE.match(line)), len(rest))
    if length < len(rest):
        while length and rest[length - 1].lstrip().startswith("#"):
            length -= 1
    return text[: begin[0]] + "".join(rest[length:])


def _json_with(text: str, tables: Sequence[Mapping[str, Any]]) -> str:
    document = {**msgspec.json.decode(text), "nodes": tables}
    return msgspec.json.format(msgspec.json.encode(document)).decode() + "\n"


def _tables(text: str, path: Path) -> list[dict[str, Any]]:
    document = msgspec.json.decode(text)
    if "endpoints" in document:
        raise EditRefused(f"{path} is a file of llm-d: its own tools change it")
    return list(document.get("nodes", []))


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise EditRefused(f"{path}: {error.strerror or error}") from error
    if len(text) > MAX_FILE_BYTES:
        raise EditRefused(f"{path}: longer than {MAX_FILE_BYTES} bytes")
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise EditRefused(f"{path}: not UTF-8 at byte {error.start}") from error


def _members(text: str, path: Path) -> Sequence[Member]:
    try:
        return read_members(text.encode(), is_toml=path.suffix == ".toml").members
    except SettingsError as error:
        raise EditRefused(f"{path}: {error}") from error


def _replace(path: Path, text: str, wanted: Sequence[Member]) -> None:
    """Replaces the file. Raises EditRefused, and changes nothing, if `text` does not list `wanted`."""
    if list(_members(text, path)) != list(wanted):
        raise EditRefused(
            f"{path} is written in a way that this command cannot change: edit it, and run `prfaas check`"
        )
    real = path.resolve()  # the file that a link stands for, not the link
    hidden = real.with_name(f".{real.name}.{os.getpid()}")
    try:
        before = real.stat() if real.exists() else None
        with hidden.open("w", encoding="utf-8") as file:
            if before is not None:
                with suppress(PermissionError):  # only root may; the gateway must be able to read it as before
                    os.fchown(file.fileno(), before.st_uid, before.st_gid)
            os.fchmod(file.fileno(), stat.S_IMODE(before.st_mode) if before is not None else NEW_MODE)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        hidden.rename(real)
    except OSError as error:
        with suppress(OSError):
            hidden.unlink(missing_ok=True)
        raise EditRefused(f"{path}: {error.strerror or error}") from error

"""`prfaas nodes`: lists the nodes of a gateway, and adds one to its watched file or to etcd, or removes one."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table

from gateway.config.gateway import GatewayConfig
from gateway.errors import GatewayConfigError
from membership import edit
from membership.documents import told
from membership.errors import EditRefused
from membership.member import Member
from prfaas.commands.fleet.members import ListedMembers, listed_members
from prfaas.commands.operator import gateway_of
from prfaas.errors import MembersError
from transport.control.settings import SettingsError

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesWish:
    """What the operator wants done, in the file of this gateway; with `file` in a file of members that no gateway names."""

    gateway_file: Path
    file: Path | None = None


class MemberList(Protocol):
    """Where operators list nodes. `where` is its place, `kind` what messages call it. Changes raise EditRefused."""

    @property
    def where(self) -> str: ...

    @property
    def kind(self) -> str: ...

    def add(self, member: Member) -> None: ...

    def remove(self, node: str) -> Member: ...


class _FileOfMembers:
    kind = "the file"

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def where(self) -> str:
        return str(self._path)

    def add(self, member: Member) -> None:
        edit.add(self._path, member)

    def remove(self, node: str) -> Member:
        return edit.remove(self._path, node)


def show(wish: NodesWish, console: Console, as_json: bool) -> bool:
    """Whether every registry could be read. Raises MembersError."""
    if wish.file is not None:
        try:
            members = tuple(edit.listed(wish.file))
        except EditRefused as error:
            raise MembersError(str(error)) from error
        found = ListedMembers(
            members=members, source_of=dict.fromkeys([each.id for each in members], "file"), refused=(), failures=(),
            problems=(),
        )  # fmt: skip
    else:
        found = listed_members(_config(wish.gateway_file))
    if as_json:
        console.out(json.dumps(_as_table(found), indent=2), highlight=False)
    else:
        _tell(found, console)
    return not found.failures


def add(wish: NodesWish, node: Mapping[str, Any], say: Say) -> None:
    """Lists one more node, given as a member's fields. Raises MembersError."""
    try:
        member = Member(**node)
    except SettingsError as error:
        raise MembersError(str(error)) from error
    list_of = _watched(wish)
    if wish.file is None:
        config = _config(wish.gateway_file)
        if not config.admits(member):
            raise MembersError(
                f"{member.agent} is another machine, and traffic to it would be in clear: give the gateway "
                "certificate, key and authority, or set plain = true"
            )
        for known in listed_members(config).members:
            if member.id == known.id or member.agent == known.agent:
                raise MembersError(f"{known.id} at {known.agent} is listed already")
    try:
        list_of.add(member)
    except EditRefused as error:
        raise MembersError(str(error)) from error
    say(f"{list_of.where}: {member.id} is listed at {member.agent}")
    say(f"gateways that watch {list_of.kind} ask its agent now, and send it requests as soon as it is ready")


def remove(wish: NodesWish, node: str, say: Say) -> None:
    """Lists a node no longer. Raises MembersError."""
    list_of = _watched(wish)
    try:
        gone = list_of.remove(node)
    except EditRefused as error:
        raise MembersError(str(error)) from error
    say(f"{list_of.where}: {gone.id} at {gone.agent} is listed no more")
    say(
        f"gateways that watch {list_of.kind} send it nothing new; what it has under way ends. The node itself goes on running"
    )


def _config(file: Path) -> GatewayConfig:
    try:
        return gateway_of(file)
    except GatewayConfigError as error:
        raise MembersError(str(error)) from error


def _watched(wish: NodesWish) -> MemberList:
    if wish.file is not None:
        return _FileOfMembers(wish.file)
    membership = _config(wish.gateway_file).membership
    if membership.file is not None:
        return _FileOfMembers(membership.file)
    if membership.etcd is not None:
        from membership.etcd.edit import EtcdEditor  # its messages are loaded where there is an etcd

        return EtcdEditor(membership.etcd)
    if membership.kubernetes is not None:
        raise MembersError(
            f"{wish.gateway_file} takes its nodes from Kubernetes: scale the StatefulSet, or label and delete Pods"
        )
    raise MembersError(
        f'{wish.gateway_file} watches no file of members: add [gateway.membership] with file = "nodes.toml", '
        "or name such a file with --file"
    )


def _as_table(found: ListedMembers) -> dict[str, object]:
    return {
        "nodes": [{**told(member), "source": found.source_of.get(member.id, "")} for member in found.members],
        "refused": [told(member) for member in found.refused],
        "failures": list(found.failures),
        "problems": list(found.problems),
    }


def _tell(found: ListedMembers, console: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("node", "agent", "cluster", "role", "revision", "from"):
        table.add_column(column)
    for member in found.members:
        source = found.source_of.get(member.id, "")
        table.add_row(member.id, member.agent, member.cluster, member.role, member.revision, source)
    console.print(table)
    for member in found.refused:
        console.print(f"left out: {member.id} at {member.agent} would be spoken to in clear", markup=False)
    for line in (*found.failures, *found.problems):
        console.print(line, markup=False, highlight=False, soft_wrap=True)

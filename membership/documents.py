"""Members as files say them: ours in TOML or JSON, and the endpoints file of llm-d in JSON.

[[nodes]]                          {"endpoints": [{"name": "p0", "namespace": "llm", "address": "10.0.0.7",
id = "west-d0"                                     "port": "7001", "labels": {"llm-d.ai/role": "prefill"}}]}
agent = "10.0.0.7:7001"
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from typing import Any, Final

import msgspec

from membership.member import Member
from membership.view import RegistryReading
from transport.control.settings import SettingsError, build, parse_toml, require, require_known, require_tables

ROLE_LABEL: Final = "llm-d.ai/role"
OWN_ROLE_LABEL: Final = "prfaas/role"  # of a node of ours; it counts before llm-d's
PORT_LABEL: Final = "prfaas/agent-port"  # where llm-d's `port` is the model server's
CLUSTER_LABEL: Final = "prfaas/cluster"
REVISION_LABEL: Final = "prfaas/revision"
OWN_ROLES: Final = ("prefill", "decode")
NOT_OURS: Final = "encode"  # llm-d's role of servers that only encode images


def read_members(text: bytes, *, is_toml: bool) -> RegistryReading:
    """What a file of members says. Raises SettingsError."""
    document = parse_toml(text) if is_toml else _parse_json(text)
    require(isinstance(document, dict), "the file", type(document).__name__, "a table")
    reading = _of_llm_d(document) if "endpoints" in document else _own(document)
    _once(reading.members, "id")
    _once(reading.members, "agent")
    return reading


def read_entry(text: bytes) -> tuple[Member, float]:
    """The member that one node has written of itself, and its lease. Raises SettingsError."""
    document = _parse_json(text)
    require(isinstance(document, dict), "the file", type(document).__name__, "a table")
    lease_s = document.pop("lease_s", 0.0)
    is_number = isinstance(lease_s, int | float) and not isinstance(lease_s, bool)
    require(is_number and 0 <= lease_s <= 86_400, "lease_s", lease_s, "a number of seconds, 0 for ever")
    return build(Member, document, ""), float(lease_s)


def entry_text(member: Member, lease_s: float) -> bytes:
    """What a node writes of itself."""
    return msgspec.json.format(msgspec.json.encode({**told(member), "lease_s": lease_s})) + b"\n"


def told(member: Member) -> dict[str, Any]:
    """A member as a table, without what says nothing."""
    defaults = {each.name: "" if each.default is not MISSING else {} for each in fields(Member)}
    return {key: value for key, value in asdict(member).items() if value != defaults[key]}


def _own(document: Mapping[str, Any]) -> RegistryReading:
    require_known(document, ["nodes", "may_be_empty"])
    tables = require_tables(document.get("nodes", []), "nodes")
    may_be_empty = document.get("may_be_empty", False)
    require(isinstance(may_be_empty, bool), "may_be_empty", may_be_empty, "true or false")
    return RegistryReading(
        members=tuple(_own_member(table, f"nodes[{index}]") for index, table in enumerate(tables)),
        is_empty_meant=may_be_empty and not tables,
    )


def _own_member(table: Mapping[str, Any], where: str) -> Member:
    agent = table.get("agent")
    named = {"id": agent, **table} if isinstance(agent, str) else table
    return build(Member, named, where)


def _of_llm_d(document: Mapping[str, Any]) -> RegistryReading:
    members, problems = [], []
    for index, table in enumerate(require_tables(document["endpoints"], "endpoints")):
        where = f"endpoints[{index}]"
        labels = table.get("labels") or {}
        if not isinstance(labels, dict):
            raise SettingsError(f"{where}: labels must be a table")
        if labels.get(ROLE_LABEL) == NOT_OURS:
            problems.append(f"{where}: {table.get('name')!r} only encodes, which no node of ours does")
        else:
            members.append(_endpoint(table, labels, where))
    return RegistryReading(members=tuple(members), problems=tuple(problems))


def _endpoint(table: Mapping[str, Any], labels: Mapping[str, Any], where: str) -> Member:
    """Other keys are llm-d's own business. A role that combines two is for the agent to say."""
    for key in ("name", "address"):
        if not isinstance(table.get(key), str):
            raise SettingsError(f"{where}: {key} must be a string")
    own_role = labels.get(OWN_ROLE_LABEL)
    if own_role is not None and own_role not in OWN_ROLES:
        raise SettingsError(f"{where}: label {OWN_ROLE_LABEL} = {own_role!r}: must be one of {', '.join(OWN_ROLES)}")
    namespace, role = table.get("namespace") or "", own_role or labels.get(ROLE_LABEL)
    port = str(labels.get(PORT_LABEL) or table.get("port", ""))
    member = {
        "id": f"{namespace}/{table['name']}" if namespace else table["name"],
        "agent": _address(table["address"], port),
        "cluster": labels.get(CLUSTER_LABEL, ""),
        "role": role if role in OWN_ROLES else "",
        "revision": labels.get(REVISION_LABEL, ""),
        "labels": labels,
    }
    return build(Member, member, where)


def _address(host: str, port: str) -> str:
    """host:port, an IPv6 address in brackets; whether the port can be one, the member says."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _once(members: Sequence[Member], key: str) -> None:
    seen: set[str] = set()
    for member in members:
        value = getattr(member, key)
        if value in seen:
            raise SettingsError(f"nodes: two have {key} = {value!r}")
        seen.add(value)


def _parse_json(text: bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(f"not valid JSON: {error}") from error


def toml_block(member: Member) -> str:
    """A [[nodes]] table of a file of members."""
    table = told(member)
    labels: Mapping[str, str] = table.pop("labels", {})
    lines = ["[[nodes]]", *(f"{key} = {_quoted(value)}" for key, value in table.items())]
    if labels:
        pairs: Iterable[str] = (f"{_quoted(key)} = {_quoted(value)}" for key, value in labels.items())
        lines.append(f"labels = {{ {', '.join(pairs)} }}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """A basic string of TOML, which JSON's strings are, too."""
    return msgspec.json.encode(text).decode()

"""What files of members may say, in our words and in llm-d's."""

import json

import pytest

from membership.documents import entry_text, read_entry, read_members, toml_block
from membership.member import Member
from transport.control.settings import SettingsError

FULL = Member(
    id="west-d0", agent="[2001:db8::7]:7001", name="west-d0.example", cluster="west", role="decode", revision="r7",
    labels={"rack": 'b"4', "topology.kubernetes.io/zone": "a"},
)  # fmt: skip


def test_ours_in_toml_and_in_json() -> None:
    text = (
        b'[[nodes]]\nid = "p0"\nagent = "10.0.0.1:7001"\nlabels = { rack = "b4" }\n[[nodes]]\nagent = "10.0.0.2:7001"\n'
    )
    first = Member(id="p0", agent="10.0.0.1:7001", labels={"rack": "b4"})
    second = Member(id="10.0.0.2:7001", agent="10.0.0.2:7001")
    assert list(read_members(text, is_toml=True).members) == [first, second]
    tables = [{"id": "p0", "agent": "10.0.0.1:7001", "labels": {"rack": "b4"}}, {"agent": "10.0.0.2:7001"}]
    assert list(read_members(json.dumps({"nodes": tables}).encode(), is_toml=False).members) == [first, second]


def test_a_list_is_meant_to_be_empty_only_where_it_says_so() -> None:
    assert not read_members(b'{"nodes": []}', is_toml=False).is_empty_meant
    assert read_members(b'{"nodes": [], "may_be_empty": true}', is_toml=False).is_empty_meant
    assert not read_members(b'may_be_empty = true\n[[nodes]]\nagent = "a:1"', is_toml=True).is_empty_meant
    with pytest.raises(SettingsError, match="may_be_empty"):
        read_members(b'{"may_be_empty": 1}', is_toml=False)


def test_what_is_written_is_read_as_it_was() -> None:
    assert list(read_members(toml_block(FULL).encode(), is_toml=True).members) == [FULL]
    assert read_entry(entry_text(FULL, 120.0)) == (FULL, 120.0)


def test_llm_d_endpoints() -> None:
    endpoints = [
        {
            "name": "p0",
            "namespace": "llm",
            "address": "10.0.0.1",
            "port": "7001",
            "labels": {"llm-d.ai/role": "prefill"},
        },
        {"name": "d0", "address": "2001:db8::1", "port": "8000", "labels": {"prfaas/agent-port": "7001"}, "weight": 3},
        {"name": "b0", "address": "10.0.0.3", "port": 7001, "labels": {"llm-d.ai/role": "prefill-decode"}},
        {"name": "e0", "address": "10.0.0.4", "port": "8000", "labels": {"llm-d.ai/role": "encode"}},
    ]
    found = read_members(json.dumps({"endpoints": endpoints}).encode(), is_toml=False)
    assert [(each.id, each.agent, each.role) for each in found.members] == [
        ("llm/p0", "10.0.0.1:7001", "prefill"),
        ("d0", "[2001:db8::1]:7001", ""),
        ("b0", "10.0.0.3:7001", ""),
    ]
    assert found.problems == ("endpoints[3]: 'e0' only encodes, which no node of ours does",)


def test_our_own_role_counts_before_that_of_llm_d() -> None:
    labels = {"prfaas/role": "decode", "llm-d.ai/role": "prefill"}
    endpoints = [{"name": "d0", "address": "10.0.0.1", "port": "8000", "labels": labels}]
    (found,) = read_members(json.dumps({"endpoints": endpoints}).encode(), is_toml=False).members
    assert (found.role, found.labels) == ("decode", labels)


@pytest.mark.parametrize(
    ("text", "is_toml", "why"),
    [
        (b"[[nodes]]\nid = 'a'\n", True, r"nodes\[0\]: missing: agent"),
        (b"[[nodes]]\nagent = 'here'\n", True, "must be host:port"),
        (b"[[nodes]]\nagent = 'h:1'\nport = 3\n", True, "unknown key 'port'"),
        (b"[[nodes]]\nagent = 'h:1'\n[[nodes]]\nagent = 'h:1'\n", True, "two have id = 'h:1'"),
        (b"[[nodes]]\nagent='h:1'\nid='a'\n[[nodes]]\nagent='h:1'\nid='b'\n", True, "two have agent = 'h:1'"),
        (b"[[nodes]]\nagent = 'h:1'\nid = 'a b'\n", True, "no blanks"),
        (b"[[nodes]]\nagent = 'h:1'\nlabels = { a = 1 }\n", True, "labels.a = 1: must be a string"),
        (b"[[node]]\nagent = 'h:1'\n", True, "unknown key 'node'"),
        (b"[[nodes]", True, "not valid TOML"),
        (b"\xff", True, "not valid TOML"),
        (b"", False, "not valid JSON"),
        (b"[]", False, "must be a table"),
        (b"[" * 100_000, False, "not valid JSON"),
        (b'{"nodes": {}}', False, "must be an array of tables"),
        (b'{"endpoints": [{"name": "a"}]}', False, "address must be a string"),
        (b'{"endpoints": [{"name": "a", "address": "h", "port": "x"}]}', False, "must be host:port"),
        (b'{"endpoints": [{"name": "a", "address": "h", "labels": 3}]}', False, "labels must be a table"),
        (
            b'{"endpoints": [{"name": "a", "address": "h", "port": 1, "labels": {"prfaas/role": "both"}}]}',
            False,
            "label prfaas/role = 'both': must be one of prefill, decode",
        ),
    ],
)
def test_what_cannot_be_used_says_why(text: bytes, is_toml: bool, why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        read_members(text, is_toml=is_toml)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'{"id": "a", "agent": "h:1", "lease_s": true}', "lease_s"),
        (b'{"id": "a", "agent": "h:1", "lease_s": -1}', "lease_s"),
        (b'{"id": "a"}', "missing: agent"),
        (b'"a"', "must be a table"),
        (b'{"id": "\xc3(", "agent": "h:1"}', "not valid JSON"),
    ],
)
def test_an_entry_that_cannot_be_used_says_why(text: bytes, why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        read_entry(text)


@pytest.mark.parametrize("agent", ["10.0.0.1:" + "1" * 5000, "10.0.0.1\nforged:7001", "a b:7001"])
def test_an_address_that_cannot_be_one_is_refused(agent: str) -> None:
    with pytest.raises(SettingsError, match="agent"):
        read_entry(json.dumps({"id": "a", "agent": agent}).encode())


@pytest.mark.parametrize("port", ["\u00b2", "1" * 5000])
def test_a_port_of_llm_d_that_cannot_be_one_is_refused(port: str) -> None:
    text = json.dumps({"endpoints": [{"name": "p0", "address": "10.0.0.7", "port": port}]})
    with pytest.raises(SettingsError, match="agent"):
        read_members(text.encode(), is_toml=False)

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.errors import RemoteProtocolError
from transport.rdma.topology import (
    ANY_NODE,
    MAX_RAILS,
    Nic,
    RailPlan,
    format_nics,
    judged,
    matrix,
    node_of_device,
    numa_node_of,
    parse_nics,
    plan_rails,
)

nics = st.lists(
    st.builds(
        Nic,
        name=st.from_regex(r"[a-z0-9_]{1,8}", fullmatch=True),
        fabric=st.sampled_from(["roce:10.0.0.0/24", "roce:10.0.1.0/24", "ib:fe80"]),
        numa_node=st.integers(-1, 3),
        preferred=st.booleans(),
    ),
    max_size=8,
    unique_by=lambda nic: nic.name,
).map(tuple)


def nic(name: str, node: int = ANY_NODE, fabric: str = "f") -> Nic:
    return Nic(name=name, fabric=fabric, numa_node=node)


def test_the_matrix_prefers_nics_of_the_memorys_node() -> None:
    host = [nic("mlx5_0", 0), nic("mlx5_1", 0), nic("mlx5_2", 1), nic("mlx5_3", 1)]
    assert matrix(host) == {
        "cpu:0": (("mlx5_0", "mlx5_1"), ("mlx5_2", "mlx5_3")),
        "cpu:1": (("mlx5_2", "mlx5_3"), ("mlx5_0", "mlx5_1")),
    }
    assert matrix([nic("rxa0"), nic("rxb0")]) == {"cpu:0": (("rxa0", "rxb0"), ())}


def test_memory_that_no_nic_is_near_to_is_served_by_all() -> None:
    host = [nic("a", 0), nic("b", 0)]
    assert [n.preferred for n in judged(host, 1)] == [True, True]
    assert [n.preferred for n in judged([nic("a", 0), nic("b", 1)], 1)] == [False, True]


def test_preferred_nics_meet_preferred_ones() -> None:
    near = judged([nic("n0", 0), nic("n1", 1)], 1)
    far = judged([nic("f0", 0), nic("f1", 1)], 0)
    assert plan_rails(near, far) == (RailPlan("n1", "f0", "f", 0), RailPlan("n0", "f1", "f", 1))


def test_only_nics_of_one_fabric_are_paired() -> None:
    near = [nic("n0", fabric="a"), nic("n1", fabric="b"), nic("n2", fabric="c")]
    far = [nic("f0", fabric="b"), nic("f1", fabric="a")]
    assert {(plan.local, plan.remote) for plan in plan_rails(near, far)} == {("n0", "f1"), ("n1", "f0")}
    assert plan_rails(near, [nic("f", fabric="d")]) == ()


@given(nics, nics)
def test_every_nic_that_can_be_reached_is_in_a_pair(near: tuple[Nic, ...], far: tuple[Nic, ...]) -> None:
    plans = plan_rails(near, far)
    common = {n.fabric for n in near} & {n.fabric for n in far}
    assert {plan.local for plan in plans} == {n.name for n in near if n.fabric in common}
    assert {plan.remote for plan in plans} == {n.name for n in far if n.fabric in common}
    assert list(plans) == sorted(plans, key=lambda plan: plan.tier)
    assert len(plans) <= MAX_RAILS


@given(nics)
def test_what_is_told_is_understood(told: tuple[Nic, ...]) -> None:
    assert parse_nics(format_nics(told)) == told


@pytest.mark.parametrize(
    "text", ["x", "a b c d", "a b 0 2", "a b -7 1", "a  b 0 1", "\n".join(["a b 0 1"] * 17), "a b 0 1\n", "\x00 b 0 1"]
)
def test_nonsense_is_refused(text: str) -> None:
    if text == "a b 0 1\n":
        assert len(parse_nics(text)) == 1
        return
    with pytest.raises(RemoteProtocolError):
        parse_nics(text)


@given(st.text(max_size=100))
def test_any_text_is_nics_or_a_protocol_error(text: str) -> None:
    with contextlib.suppress(RemoteProtocolError):
        parse_nics(text)


def test_the_node_with_most_pages_is_where_memory_lies() -> None:
    maps = (
        "7f0000000000 default file=/dev/shm/arena dirty=12 N0=4 N1=8 kernelpagesize_kB=4\n"
        "7f1000000000 default anon=1 N0=1 kernelpagesize_kB=4\n7f2000000000 default\n"
    )
    assert numa_node_of(0x7F0000000000, maps) == 1
    assert numa_node_of(0x7F1000000000, maps) == 0
    assert numa_node_of(0x7F2000000000, maps) == ANY_NODE
    assert numa_node_of(0x7F3000000000, maps) == ANY_NODE


def test_sys_says_which_node_a_device_hangs_on(tmp_path: Path) -> None:
    (tmp_path / "mlx5_0" / "device").mkdir(parents=True)
    (tmp_path / "mlx5_0" / "device" / "numa_node").write_text("1\n")
    assert node_of_device(tmp_path, "mlx5_0") == 1
    assert node_of_device(tmp_path, "rxe0") == ANY_NODE

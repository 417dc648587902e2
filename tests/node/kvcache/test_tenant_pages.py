"""How many pages a tenant may have, beside others and alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.kvcache.tenant_pages import MAX_FLOWS, TenantPages
from transport.turns import LATELY_S


def test_a_tenant_that_is_alone_may_have_all_pages() -> None:
    rooms = TenantPages()
    rooms.ask("a", 0.0)
    rooms.reserved("r", "a", 60)
    assert rooms.may_have("a", 4, 4, 0.0)


@pytest.mark.parametrize("how", ["holds", "waits", "has_asked"])
def test_while_another_is_about_an_eighth_is_left(how: str) -> None:
    rooms = TenantPages()
    rooms.reserved("r", "a", 50)
    match how:
        case "holds":
            rooms.reserved("s", "b", 1)
        case "waits":
            rooms.waits("b")
        case _:
            rooms.ask("b", 0.0)
    assert rooms.may_have("a", 6, 14, LATELY_S)
    assert not rooms.may_have("a", 7, 14, LATELY_S)
    assert rooms.may_have("b", 8, 14, LATELY_S)


def test_who_asked_long_ago_is_about_no_more() -> None:
    rooms = TenantPages()
    rooms.ask("b", 0.0)
    rooms.ask("a", LATELY_S)
    rooms.reserved("r", "a", 60)
    assert not rooms.may_have("a", 4, 4, LATELY_S)
    assert rooms.may_have("a", 4, 4, LATELY_S + 1.0)


def test_what_is_nobodys_is_not_bound_and_binds_nobody() -> None:
    rooms = TenantPages()
    rooms.ask("", 0.0)
    rooms.reserved("moves", "", 30)
    rooms.reserved("r", "a", 30)
    rooms.waits("")
    assert rooms.may_have("a", 4, 4, 0.0)
    assert rooms.may_have("", 4, 4, 0.0)


def test_who_holds_least_comes_first_and_of_equals_who_began_to_wait_first() -> None:
    rooms = TenantPages()
    assert rooms.is_first("a")
    rooms.reserved("r", "a", 2)
    for tenant in ("a", "c", "b"):
        rooms.waits(tenant)
    assert [tenant for tenant in "abc" if rooms.is_first(tenant)] == ["c"]
    rooms.reserved("s", "c", 1)
    assert [tenant for tenant in "abc" if rooms.is_first(tenant)] == ["b"]
    rooms.goes("b")
    rooms.released("r")
    assert [tenant for tenant in "abc" if rooms.is_first(tenant)] == ["a"]


def test_a_reservation_that_nobody_knows_is_no_harm() -> None:
    rooms = TenantPages()
    rooms.released("unknown")
    assert rooms.held("") == 0


def test_who_has_asked_is_remembered_within_bounds() -> None:
    rooms = TenantPages()
    for number in range(MAX_FLOWS + 10):
        rooms.ask(str(number), 0.0)
    rooms.reserved("r", "a", 60)
    assert not rooms.may_have("a", 4, 4, 0.0)


steps = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 20), st.booleans(), st.integers(0, 99)), max_size=80)


@given(steps)
def test_nobody_who_has_some_takes_the_last_ones_while_others_are_about(
    steps: list[tuple[str, int, bool, int]],
) -> None:
    rooms, pages, live = TenantPages(), 160, {}
    for number, (tenant, wanted, ends, which) in enumerate(steps):
        if ends and live:
            name = sorted(live)[which % len(live)]
            rooms.released(name)
            del live[name]
        free = pages - sum(size for _, size in live.values())
        rooms.ask(tenant, 0.0)
        if wanted <= free and rooms.may_have(tenant, wanted, free, 0.0):
            had = rooms.held(tenant)
            live[f"r{number:03}"] = tenant, wanted
            rooms.reserved(f"r{number:03}", tenant, wanted)
            if had and len({owner for owner, _ in live.values()}) > 1:
                assert free - wanted > 0
        for each in "abc":
            assert rooms.held(each) == sum(size for owner, size in live.values() if owner == each)

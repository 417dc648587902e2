"""Which server is chosen, over values: no proxy, no network."""

import asyncio
from collections.abc import Sequence

from gateway.picker.admission import PickLimits
from gateway.picker.asking import AskedPrompt, PickRequest
from gateway.picker.choosing import Pick, PickSettings, ServerPicker
from gateway.picker.exchange import EndpointChoice, Refusal
from gateway.picker.servers import GIVEN_UP, STALE_S, ServerPool, ServerReport
from membership.documents import OWN_ROLE_LABEL, ROLE_LABEL
from membership.member import Member


class World:
    """A pool of servers, and a picker at a time of its own."""

    def __init__(self, roles: Sequence[str], *, settings: PickSettings | None = None, **limits: object) -> None:
        self.now = 100.0
        settings = settings or PickSettings(tokens_per_s=1000)
        self.pool = ServerPool(lambda: self.now, tokens_per_s=settings.tokens_per_s, max_running=8)
        self.follow(roles)
        self.picker = ServerPicker(self.pool, settings, PickLimits(**limits))  # type: ignore[arg-type]

    def follow(self, roles: Sequence[str]) -> None:
        members = [Member(id=f"s{n}", agent=f"10.0.0.{n}:8000", role=role) for n, role in enumerate(roles)]
        self.pool.follow({member.id: member for member in members})

    def reports(self, *reports: ServerReport) -> None:
        for server, report in zip(self.pool, reports, strict=True):
            self.pool.reported(server, report)

    def ask(self, blocks: Sequence[int] = (), tokens: int = 0, **more: object) -> Pick | Refusal:
        prompt = AskedPrompt(num_tokens=tokens or 128 * len(blocks) + 10, blocks=tuple(blocks))
        return asyncio.run(self.picker.pick(PickRequest(prompt=prompt, **more)))  # type: ignore[arg-type]

    def chosen(self, blocks: Sequence[int] = (), tokens: int = 0, **more: object) -> str:
        found = self.ask(blocks, tokens, **more)
        assert isinstance(found, Pick)
        return found.choice.endpoints[0]

    def refused(self, **more: object) -> str:
        found = self.ask(**more)  # type: ignore[arg-type]
        assert isinstance(found, Refusal)
        return f"{found.status} {found.reason}"


def test_a_request_goes_to_servers_of_its_model() -> None:
    world = World([""] * 3)
    first, second, silent = world.pool
    world.pool.serves(first, ["a", "tuned"])
    world.pool.serves(second, ["b"])
    assert {world.chosen(model="tuned") for _ in range(12)} == {first.address, silent.address}
    assert {world.chosen(model="b") for _ in range(12)} == {second.address, silent.address}
    world.pool.serves(silent, ["c"])
    assert world.refused(model="d") == "404 rejected-no-endpoints"
    assert {world.chosen(model="a") for _ in range(4)} == {first.address}
    assert len({world.chosen() for _ in range(12)}) == 3  # of a body that does not say
    for _ in range(GIVEN_UP):
        world.pool.failed(first)
    assert world.refused(model="a") == "503 rejected-no-endpoints"


def test_a_prefix_is_not_counted_on_once_a_server_has_another_model() -> None:
    world = World([""])
    (server,) = world.pool
    world.pool.serves(server, ["a"])
    world.chosen(range(40), model="a")
    assert server.sent.length(tuple(range(40)))
    world.pool.serves(server, ["a"])
    assert server.sent.length(tuple(range(40)))
    world.pool.serves(server, ["b"])
    assert not server.sent.length(tuple(range(40)))


def test_prompts_are_spread_over_servers_that_are_equal() -> None:
    world = World([""] * 4)
    assert len({world.chosen(tokens=100) for _ in range(4)}) == 4


def test_a_prefix_draws_a_prompt_until_the_queue_is_longer_than_what_it_saves() -> None:
    world = World([""] * 2)
    first = world.chosen(range(40))
    world.now += 60
    assert [world.chosen(range(40)) for _ in range(3)] == [first] * 3
    for server in world.pool:
        if server.address == first:
            server.busy_until = world.now + 60
    assert world.chosen(range(40)) != first


def test_what_a_server_reports_counts_while_it_is_fresh() -> None:
    world = World([""] * 2)
    world.reports(ServerReport(waiting=50), ServerReport())
    assert {world.chosen(tokens=1) for _ in range(3)} == {"10.0.0.1:8000"}
    world.now += STALE_S + 60
    assert {world.chosen(tokens=1) for _ in range(8)} == {"10.0.0.0:8000", "10.0.0.1:8000"}


def test_prompts_go_to_prefill_servers_and_the_rest_of_a_held_one_does_not() -> None:
    world = World(["prefill", "decode"])
    found = world.ask(range(40))
    assert isinstance(found, Pick)
    assert (found.choice.endpoints, found.choice.prefiller) == (("10.0.0.1:8000",), "10.0.0.0:8000")
    world.now += 60
    again = world.ask(range(41))
    assert isinstance(again, Pick)
    assert again.choice.prefiller == ""


def test_a_server_that_only_prefills_answers_nobody() -> None:
    assert World(["prefill"]).refused() == "503 rejected-no-endpoints"


def test_fallbacks_are_other_servers_the_best_first() -> None:
    world = World([""] * 3, settings=PickSettings(fallbacks=5))
    found = world.ask(tokens=100)
    assert isinstance(found, Pick)
    assert len(set(found.choice.endpoints)) == len(found.choice.endpoints) == 3


def test_a_subset_names_addresses_or_hosts() -> None:
    world = World([""] * 3)
    assert {world.chosen(subset=frozenset({"10.0.0.2:8000"})) for _ in range(5)} == {"10.0.0.2:8000"}
    assert {world.chosen(subset=frozenset({"10.0.0.1"})) for _ in range(5)} == {"10.0.0.1:8000"}
    assert world.refused(subset=frozenset()) == "503 rejected-no-endpoints"


def test_a_server_that_does_not_report_is_left_out_until_it_does() -> None:
    world = World([""] * 2)
    first, second = world.pool
    for _ in range(GIVEN_UP):
        world.pool.failed(first)
    assert {world.chosen() for _ in range(4)} == {second.address}
    world.pool.reported(first, ServerReport())
    assert first.address in {world.chosen() for _ in range(4)}


def test_a_request_that_ends_twice_is_counted_once() -> None:
    world = World([""])
    found = world.ask()
    assert isinstance(found, Pick)
    assert world.picker.in_flight == 1
    found.end()
    found.end()
    assert world.picker.in_flight == 0


def test_a_prompt_that_ended_early_keeps_its_server_busy_no_longer() -> None:
    world = World([""])
    (server,) = world.pool
    found = [world.ask(tokens=60_000) for _ in range(2)]
    assert server.busy_until == world.now + 120
    for each, left_s in zip(found, (60.0, 0.0), strict=True):
        world.now += 1
        assert isinstance(each, Pick)
        each.end()
        assert max(0.0, server.busy_until - world.now) == left_s
    world.now += 300
    late = world.ask(tokens=1_000)
    world.now += 5
    assert isinstance(late, Pick)
    late.end()
    assert server.busy_until == world.now - 4


def test_a_proxy_that_does_not_tell_of_the_end_leaves_the_queue_as_it_was_predicted() -> None:
    world = World([""])
    (server,) = world.pool
    found = world.ask(tokens=60_000)
    assert isinstance(found, Pick)
    found.end(is_answered=False)
    assert (server.busy_until, world.picker.in_flight) == (world.now + 60, 0)


def test_a_server_that_leaves_and_comes_back_elsewhere_has_begun_anew() -> None:
    world = World([""])
    world.ask(range(9))
    (before,) = world.pool
    member = Member(id="s0", agent="10.0.0.9:8000")
    world.pool.follow({"s0": member})
    (after,) = world.pool
    assert (len(before.sent), len(after.sent), after.address) == (9, 0, "10.0.0.9:8000")


def test_places_are_bounded() -> None:
    world = World([""], max_in_flight=2)
    world.ask()
    world.ask()
    assert world.refused() == "429 rejected-saturated"


def nodes_and_sidecars(world: World, *named: tuple[str, str]) -> None:
    """Servers of roles, which a label of ours or of llm-d's says."""
    members = [
        Member(id=f"s{n}", agent=f"10.0.0.{n}:8000", role=role, labels={label: role})
        for n, (label, role) in enumerate(named)
    ]
    world.pool.follow({member.id: member for member in members})


def test_a_long_prompt_of_a_node_is_prefilled_by_a_node_and_a_short_one_where_it_is_decoded() -> None:
    world = World([])
    nodes_and_sidecars(world, (OWN_ROLE_LABEL, "prefill"), (OWN_ROLE_LABEL, "decode"))
    found = world.ask(tokens=8000)
    assert isinstance(found, Pick)
    assert found.choice == EndpointChoice(("10.0.0.1:8000",), "10.0.0.0:8000")
    found = world.ask(tokens=500)
    assert isinstance(found, Pick)
    assert found.choice == EndpointChoice(("10.0.0.1:8000",), "")


def test_neither_kind_of_server_prefills_for_the_other() -> None:
    world = World([])
    nodes_and_sidecars(
        world,
        (OWN_ROLE_LABEL, "prefill"),
        (OWN_ROLE_LABEL, "decode"),
        (ROLE_LABEL, "prefill"),
        (ROLE_LABEL, "decode"),
    )
    pairs = set()
    for number in range(12):
        found = world.ask(tokens=4000 + number)
        assert isinstance(found, Pick)
        pairs.add((found.choice.endpoints[0], found.choice.prefiller))
    assert pairs == {("10.0.0.1:8000", "10.0.0.0:8000"), ("10.0.0.3:8000", "10.0.0.2:8000")}
    nodes_and_sidecars(world, (OWN_ROLE_LABEL, "prefill"), (ROLE_LABEL, "decode"))
    found = world.ask(tokens=8000)
    assert isinstance(found, Pick)
    assert found.choice == EndpointChoice(("10.0.0.1:8000",), "")


def test_a_server_that_is_tried_next_can_ask_the_one_that_prefills() -> None:
    """All that are named are told of the same one: a sidecar cannot ask a node."""
    world = World([], settings=PickSettings(tokens_per_s=1000, fallbacks=3))
    ours, theirs = ("10.0.0.0:8000", "10.0.0.1:8000", "10.0.0.2:8000"), ("10.0.0.3:8000", "10.0.0.4:8000")
    nodes_and_sidecars(
        world,
        (OWN_ROLE_LABEL, "prefill"),
        (OWN_ROLE_LABEL, "decode"),
        (OWN_ROLE_LABEL, "decode"),
        (ROLE_LABEL, "prefill"),
        (ROLE_LABEL, "decode"),
    )
    for number in range(12):
        found = world.ask(tokens=4000 + number)
        assert isinstance(found, Pick)
        kind = ours if found.choice.prefiller in ours else theirs
        assert found.choice.prefiller in kind
        assert sorted(found.choice.endpoints) == sorted(kind[1:])
    short = world.ask(tokens=100)
    assert isinstance(short, Pick)
    if not short.choice.prefiller:
        assert len(short.choice.endpoints) == 3

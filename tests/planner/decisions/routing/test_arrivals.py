"""What is on its way to a decode node: which requests wait for it, and for how much of it."""

from dataclasses import dataclass
from random import Random

import pytest

from planner.decisions.routing.arrivals import GRACE_S, PATIENCE, Arrivals, common_blocks, sending_of
from planner.decisions.views import ClusterKind, LinkView, NodeView, Role, RouteRequest

TOKENS = 10_000


@dataclass(frozen=True, eq=False)
class Sent:
    hashes: tuple[bytes, ...]


def chain(*turns: int) -> tuple[bytes, ...]:
    """Hashes of blocks; each covers all blocks before it."""
    return tuple(repr(turns[: number + 1]).encode() for number in range(len(turns)))


def kv_bytes(num_tokens: int) -> float:
    return 1_000.0 + 100.0 * num_tokens


def sent(
    landing_tokens: int, landing_s: float, *, attention_tokens: int = 0, ttft_s: float = 1.0, compute_s: float = 0.1,
    rate: float | None = None,
):  # fmt: skip
    request = RouteRequest(num_tokens=TOKENS, kv_bytes=kv_bytes)
    decode = NodeView(
        node_id="d0", cluster="west", kind=ClusterKind.PD, role=Role.DECODE, attention_tokens=attention_tokens,
        landing_tokens=landing_tokens, landing_s=landing_s,
    )  # fmt: skip
    link = LinkView(source="east", destination="west", available_bytes_per_s=rate) if rate else None
    return sending_of(request, decode, link, ttft_s, compute_s)


def test_common_blocks_are_those_before_the_first_that_differs() -> None:
    rng = Random(3)
    for _ in range(300):
        one = [rng.randrange(3) for _ in range(rng.randrange(12))]
        other = one[: rng.randrange(len(one) + 1)] + [rng.randrange(3) for _ in range(rng.randrange(6))]
        same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        assert common_blocks(chain(*one), chain(*other)) == same


def test_the_first_of_those_with_most_in_common_is_waited_for() -> None:
    arrivals: Arrivals[Sent] = Arrivals()
    short, first, second = Sent(chain(1)), Sent(chain(1, 2, 3)), Sent(chain(1, 2, 4))
    for each in (short, first, second):
        arrivals.add(each)
    mine = chain(1, 2, 5, 6)
    found = arrivals.longest(mine, 0)
    assert found is not None
    assert (found.first, found.blocks) == (first, 2)
    assert arrivals.longest(mine, 2) is None
    before = arrivals.longest(mine, 0, before=first)
    assert before is not None
    assert before.first is short
    assert arrivals.longest(mine, 0, before=short) is None
    assert arrivals.longest((), 0) is None
    for each in (first, short, second):
        arrivals.remove(each)
    assert not len(arrivals)
    assert arrivals.longest(mine, 0) is None


def test_nobody_waits_for_a_prompt_decided_later() -> None:
    arrivals: Arrivals[Sent] = Arrivals()
    rng = Random(5)
    order = [Sent(chain(1, *(rng.randrange(2) for _ in range(6)))) for _ in range(40)]
    for each in order:
        arrivals.add(each)
    for number, each in enumerate(order):
        found = arrivals.longest(each.hashes, 0, before=each)
        assert (found is None) == (number == 0)
        assert found is None or order.index(found.first) < number


def test_what_lands_in_time_is_not_sent_again() -> None:
    found = sent(9_000, 0.9)
    assert (found.shared_tokens, found.shared_s, found.ttft_s) == (9_000, 0.9, 1.0)
    over_a_link = sent(9_000, 0.9, rate=1e6)
    assert over_a_link.link_bytes == kv_bytes(TOKENS) - 100.0 * 9_000
    assert over_a_link.link_s == pytest.approx(0.9 + over_a_link.link_bytes / 1e6)


def test_what_would_be_late_or_is_little_is_not_waited_for() -> None:
    assert sent(9_000, 2.0).shared_tokens == 0
    assert sent(900, 0.1).shared_tokens == 0
    assert sent(9_000, 0.1, attention_tokens=9_000).shared_tokens == 0
    limit_s = PATIENCE * 1.0 + GRACE_S - 0.1
    assert sent(9_000, limit_s - 0.01).shared_tokens == 9_000
    assert sent(9_000, limit_s + 0.01).shared_tokens == 0


def test_on_a_slow_link_a_longer_wait_is_worth_what_need_not_be_sent() -> None:
    alone = sent(0, 0.0, rate=1e5)
    assert alone.link_s == pytest.approx(kv_bytes(TOKENS) / 1e5)
    shared = sent(9_000, 8.0, rate=1e5)
    assert shared.shared_tokens == 9_000
    assert shared.link_s < alone.link_s


class Read(bytes):
    """A hash that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Read.compared += 1
        return super().__eq__(other)

    __hash__ = bytes.__hash__


def test_many_prompts_with_one_beginning_cost_hardly_more_than_a_hash_each() -> None:
    arrivals: Arrivals[Sent] = Arrivals()
    for number in range(200):
        arrivals.add(Sent(chain(1, 2, number, *range(200))))
    mine = tuple(Read(block) for block in chain(1, 2, -1, *range(200)))
    Read.compared = 0
    found = arrivals.longest(mine, 0)
    assert found is not None
    assert found.blocks == 2
    assert Read.compared < 2 * 200


def test_one_of_many_equal_prompts_looks_at_the_first_alone() -> None:
    arrivals: Arrivals[Sent] = Arrivals()
    order = [Sent(chain(*range(100))) for _ in range(200)]
    for each in order:
        arrivals.add(each)
    mine = tuple(Read(block) for block in chain(*range(100)))
    Read.compared = 0
    found = arrivals.longest(mine, 0, before=order[-1])
    assert found is not None
    assert found.first is order[0]
    assert Read.compared < 20

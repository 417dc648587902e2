"""What the nodes of one group of ranks tell each other."""

import asyncio
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from node.process.rank_group import (
    DRAINED,
    ENGINE_ENDED,
    HEARD,
    LINE_VARIABLE,
    MAY_END,
    START_ANEW,
    STARTS_ANEW,
    DeathsTold,
    RankGroup,
)
from prfaas.system.rank_lines import RankLines, RankTalk

WAIT_S = 60.0


def test_an_engine_that_has_ended_has_those_of_the_others_start_anew() -> None:
    talk = RankTalk(3)
    assert list(talk.heard(1, ENGINE_ENDED)) == [(1, HEARD), (0, START_ANEW), (2, START_ANEW)]
    assert list(talk.gone(2)) == []
    assert list(talk.heard(0, STARTS_ANEW)) == []
    assert list(talk.heard(0, ENGINE_ENDED)) == [(0, HEARD), (1, START_ANEW)]


def test_an_engine_that_ends_of_the_death_of_another_ends_none() -> None:
    """It cannot go on without that one, and may see so before it is told. The first may be there again by then."""
    talk = RankTalk(3)
    assert list(talk.heard(1, ENGINE_ENDED)) == [(1, HEARD), (0, START_ANEW), (2, START_ANEW)]
    assert list(talk.heard(2, ENGINE_ENDED)) == [(2, HEARD)]
    assert [list(talk.heard(rank, STARTS_ANEW)) for rank in (0, 2)] == [[], []]
    assert list(talk.heard(2, ENGINE_ENDED)) == [(2, HEARD), (0, START_ANEW), (1, START_ANEW)], "that is another death"


@given(st.integers(2, 5), st.data())
def test_each_rank_counts_each_death_of_its_group_once(count: int, data: st.DataObject) -> None:
    """However many engines end of it, before they are told or because they are, and in whatever order that is heard. One that
    has ended by itself is there again at once: it is told so late that it cannot see whether that is news."""
    talk, nodes, counted = RankTalk(count), [DeathsTold() for _ in range(count)], [0] * count
    to_parent: list[list[bytes]] = [[] for _ in range(count)]
    to_node: list[list[bytes]] = [[] for _ in range(count)]

    def end_by_itself(rank: int) -> None:
        counted[rank] += 1
        nodes[rank].has_ended()
        to_parent[rank].append(ENGINE_ENDED)

    for death in range(1, 4):
        end_by_itself(first := data.draw(st.integers(0, count - 1)))
        ending = data.draw(st.sets(st.integers(0, count - 1))) - {first}  # by themselves, unless they are told before
        while waiting := [rank for rank in range(count) if to_parent[rank] or to_node[rank] or rank in ending]:
            rank = data.draw(st.sampled_from(waiting))
            can = [("end", rank in ending), ("parent", to_parent[rank]), ("node", to_node[rank])]
            match data.draw(st.sampled_from([what for what, it_can in can if it_can])):
                case "end":
                    ending.discard(rank)
                    end_by_itself(rank)
                case "parent":
                    for other, word in talk.heard(rank, to_parent[rank].pop(0)):
                        to_node[other].append(word)
                case "node" if to_node[rank].pop(0) == HEARD:
                    nodes[rank].was_heard()
                case "node":
                    ending.discard(rank)
                    counted[rank] += not nodes[rank].is_counted
                    to_parent[rank].append(STARTS_ANEW)
        assert counted == [death] * count


def test_none_ends_before_all_have_drained() -> None:
    talk = RankTalk(3)
    assert list(talk.heard(0, DRAINED)) == []
    assert list(talk.gone(1)) == [], "what has ended has drained, but one still runs"
    assert list(talk.heard(2, DRAINED)) == [(0, MAY_END), (2, MAY_END)]


def test_ranks_that_are_no_group_have_no_lines() -> None:
    with RankLines(0) as lines:
        lines.started(0)
        assert lines.descriptors(0) == ()
        assert lines.environment(0) == {}


def test_nodes_hear_each_other_through_their_lines() -> None:
    async def scenario() -> None:
        anew: list[tuple[int, bool]] = []
        started = asyncio.Event()

        def start(rank: int, is_counted: bool) -> None:
            anew.append((rank, is_counted))
            started.set()

        with RankLines(2) as lines:
            groups = [RankGroup(lines.theirs(rank).dup()) for rank in range(2)]
            for rank, group in enumerate(groups):
                group.listen(partial(start, rank))
                lines.started(rank)
            groups[0].engine_ended()
            async with asyncio.timeout(WAIT_S):
                await started.wait()
                first = asyncio.create_task(groups[0].drained())
                await asyncio.sleep(0.05)
                assert not first.done()
                groups[1].close()  # as when its process has ended
                await first
            assert anew == [(1, False)]
            groups[0].close()

    asyncio.run(scenario())


def test_a_node_whose_engine_has_ended_of_what_it_is_told_late_has_counted_that() -> None:
    """Both end of the same death. The process that started them has been slow, so the second one's may be there again."""

    async def scenario() -> None:
        anew = asyncio.Queue[bool]()
        with RankLines(2) as lines:
            groups = [RankGroup(lines.theirs(rank).dup()) for rank in range(2)]
            for group in groups:
                group.listen(anew.put_nowait)
                group.engine_ended()
            for rank in range(2):
                lines.started(rank)
            async with asyncio.timeout(WAIT_S):
                assert await anew.get()
                await asyncio.gather(*(group.drained() for group in groups))  # so all words have come
                groups[0].engine_ended()
                assert not await anew.get(), "that is another death"
            assert anew.empty()
            for group in groups:
                group.close()

    asyncio.run(scenario())


def test_none_waits_for_a_rank_that_was_not_started() -> None:
    """The signal to end came while the first ones were being started."""

    async def scenario() -> None:
        with RankLines(2) as lines:
            group = RankGroup(lines.theirs(0).dup())
            group.listen(lambda _: None)
            lines.started(0)
            lines.not_started(1)
            async with asyncio.timeout(WAIT_S):
                await group.drained()
            group.close()

    asyncio.run(scenario())


def test_a_line_that_breaks_keeps_no_node() -> None:
    async def scenario() -> None:
        lines = RankLines(2)
        group = RankGroup(lines.theirs(0).dup())
        group.listen(lambda _: None)
        with lines:
            pass
        async with asyncio.timeout(WAIT_S):
            await group.drained()
        group.engine_ended()
        group.close()

    asyncio.run(scenario())


def test_a_node_on_its_own_waits_for_none() -> None:
    async def scenario() -> None:
        group = RankGroup.of({})
        group.listen(lambda _: None)
        group.engine_ended()
        async with asyncio.timeout(WAIT_S):
            await group.drained()

    asyncio.run(scenario())


def test_a_process_finds_its_line_by_its_number() -> None:
    async def scenario() -> None:
        with RankLines(1) as lines:
            group = RankGroup.of({LINE_VARIABLE: str(lines.theirs(0).dup().detach())})
            group.listen(lambda _: None)
            lines.started(0)
            async with asyncio.timeout(WAIT_S):
                await group.drained()
            group.close()

    asyncio.run(scenario())

"""What the nodes of one group of ranks tell each other."""

import asyncio
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from node.process.rank_group import (
    DRAINED,
    ENGINE_ENDED,
    LINE_VARIABLE,
    MAY_END,
    START_ANEW,
    STARTS_ANEW,
    RankGroup,
)
from prfaas.system.rank_lines import RankLines, RankTalk

WAIT_S = 10.0


def test_an_engine_that_has_ended_has_those_of_the_others_start_anew() -> None:
    talk = RankTalk(3)
    assert list(talk.heard(1, ENGINE_ENDED)) == [(0, START_ANEW), (2, START_ANEW)]
    assert list(talk.gone(2)) == []
    assert list(talk.heard(0, STARTS_ANEW)) == []
    assert list(talk.heard(0, ENGINE_ENDED)) == [(1, START_ANEW)]


def test_an_engine_that_ends_of_the_death_of_another_ends_none() -> None:
    """It cannot go on without that one, and may see so before it is told. The first may be there again by then."""
    talk = RankTalk(3)
    assert list(talk.heard(1, ENGINE_ENDED)) == [(0, START_ANEW), (2, START_ANEW)]
    assert list(talk.heard(2, ENGINE_ENDED)) == []
    assert [list(talk.heard(rank, STARTS_ANEW)) for rank in (0, 2)] == [[], []]
    assert list(talk.heard(2, ENGINE_ENDED)) == [(0, START_ANEW), (1, START_ANEW)], "that is another death"


@given(st.integers(2, 5), st.data())
def test_each_rank_counts_each_death_of_its_group_once(count: int, data: st.DataObject) -> None:
    """However many engines end of it, before they are told or because they are, and in whatever order that is heard."""
    talk, counted = RankTalk(count), [0] * count
    for death in range(1, 4):
        sent: dict[int, list[bytes]] = {
            rank: [] for rank in range(count)
        }  # on its way to the process that started them
        told, were_told = set[int](), set[int]()
        first = data.draw(st.integers(0, count - 1))
        by_themselves = {first} | data.draw(st.sets(st.integers(0, count - 1)))
        for rank in by_themselves:
            counted[rank] += 1
            sent[rank].append(ENGINE_ENDED)
        while waiting := [rank for rank in range(count) if sent[rank] or rank in told]:
            rank = data.draw(st.sampled_from(waiting))
            if sent[rank] and (rank not in told or data.draw(st.booleans())):
                for other, word in talk.heard(rank, sent[rank].pop(0)):
                    assert word == START_ANEW
                    assert other not in were_told
                    assert ENGINE_ENDED in sent[other] or other not in by_themselves, (
                        "it said so: it may be there again"
                    )
                    told.add(other)
                    were_told.add(other)
            elif rank in told:
                told.discard(rank)
                counted[rank] += rank not in by_themselves
                sent[rank].append(STARTS_ANEW)
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
        anew: list[int] = []
        started = asyncio.Event()

        def start(rank: int) -> None:
            anew.append(rank)
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
            assert anew == [1]
            groups[0].close()

    asyncio.run(scenario())


def test_none_waits_for_a_rank_that_was_not_started() -> None:
    """The signal to end came while the first ones were being started."""

    async def scenario() -> None:
        with RankLines(2) as lines:
            group = RankGroup(lines.theirs(0).dup())
            group.listen(lambda: None)
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
        group.listen(lambda: None)
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
        group.listen(lambda: None)
        group.engine_ended()
        async with asyncio.timeout(WAIT_S):
            await group.drained()

    asyncio.run(scenario())


def test_a_process_finds_its_line_by_its_number() -> None:
    async def scenario() -> None:
        with RankLines(1) as lines:
            group = RankGroup.of({LINE_VARIABLE: str(lines.theirs(0).dup().detach())})
            group.listen(lambda: None)
            lines.started(0)
            async with asyncio.timeout(WAIT_S):
                await group.drained()
            group.close()

    asyncio.run(scenario())

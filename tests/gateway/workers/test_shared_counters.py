"""The board that workers share; here as several of them see it, in one process."""

from pathlib import Path
from typing import cast

import pytest

from gateway.cluster.agent_client import AgentClient
from gateway.cluster.agent_values import NodeInfo
from gateway.cluster.node import ClusterNode, NodeWork
from gateway.workers.shared_counters import IN_FLIGHT, WAITING, SharedCounters, SharedInFlightSlots, WorkerState
from planner.decisions.estimates.decoding import PrefillShare


def node(name: str, cluster: str) -> ClusterNode:
    made = ClusterNode(cast(AgentClient, None), name)  # no call is made to it
    made.info = NodeInfo(
        node_id=name, cluster=cluster, cluster_kind="pd", role="decode", state="ready", engine_url="", model_id="m",
        layout_json="", layout_fingerprint="f", max_model_len=1, boot_id="1", engine_pid=1, block_size=16,
    )  # fmt: skip
    return made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    SharedCounters.create(tmp_path / "board", workers=3, nodes=2)
    return tmp_path / "board"


def test_a_limit_holds_for_all_workers_together(path: Path) -> None:
    one, other, parent = SharedCounters(path, 0), SharedCounters(path, 1), SharedCounters(path)
    assert [board.take(IN_FLIGHT, 3) for board in (one, other, one, other)] == [True, True, True, False]
    assert one.take(WAITING, 1)
    other.give_back(IN_FLIGHT)
    assert (one.taken(IN_FLIGHT), one.taken(WAITING)) == (2, 1)
    parent.clear(0)
    assert (other.taken(IN_FLIGHT), other.taken(WAITING)) == (0, 0)
    for board in (one, other, parent):
        board.close()


def test_workers_take_places_in_the_order_in_which_their_firsts_came_and_a_dead_one_is_in_no_ones_way(
    path: Path,
) -> None:
    one, other, parent = SharedCounters(path, 0), SharedCounters(path, 1), SharedCounters(path)
    places = [SharedInFlightSlots(board) for board in (one, other)]
    assert places[0].take(1)
    places[0].first_waits(20.0)
    places[1].first_waits(10.0)
    assert [each.take_in_turn(1) for each in places] == [False, False]
    places[0].give_back()
    assert [each.take_in_turn(1) for each in places] == [False, True]
    places[1].first_waits(15.0)
    places[1].give_back()
    assert not places[0].take_in_turn(1)
    parent.clear(1)
    assert places[0].take_in_turn(1)
    places[0].first_waits(None)
    places[0].give_back()
    places[1].first_waits(30.0)
    assert places[1].take_in_turn(1)
    for board in (one, other, parent):
        board.close()


def test_work_of_one_worker_is_seen_by_all_and_goes_with_it(path: Path) -> None:
    boards = [SharedCounters(path, number) for number in range(2)]
    views = [[node("a", "east"), node("b", "west")] for _ in boards]
    for board, nodes in zip(boards, views, strict=True):
        board.join(nodes)
    work = NodeWork(tokens=100, destination="west", promised_bytes=5_000)
    views[0][0].take(work)
    views[1][0].take(NodeWork(tokens=7))
    for board, nodes in zip(boards, views, strict=True):
        board.catch_up(nodes)
        assert [(each.pending_requests, each.pending_tokens) for each in nodes] == [(2, 107), (0, 0)]
        assert [dict(each.promised_bytes) for each in nodes] == [{"west": 5_000}, {}]
    views[0][0].give_back(work)
    boards[1].catch_up(views[1])
    assert (views[1][0].pending_requests, views[1][0].pending_tokens, views[1][0].promised_bytes) == (1, 7, {})
    boards[0].clear(1)
    boards[0].catch_up(views[0])
    assert views[0][0].pending_requests == 0
    for board in boards:
        board.close()


def test_what_decode_nodes_compute_is_one_share(path: Path) -> None:
    boards = [SharedCounters(path, number) for number in range(2)]
    views = [[node("a", "west"), node("b", "west")] for _ in boards]
    alone = PrefillShare()
    for turn, (board, nodes) in enumerate([*zip(boards, views, strict=True)] * 2):
        board.join(nodes)
        nodes[0].prefill_share.add(0.5, 1_000.0 + turn)
        alone.add(0.5, 1_000.0 + turn)
    for nodes in views:
        assert nodes[0].prefill_share.at(1_005.0) == pytest.approx(alone.at(1_005.0))
        assert nodes[1].prefill_share.at(1_005.0) == 0
    for board in boards:
        board.close()


def test_more_clusters_than_columns_are_nobodys_loss_but_the_promise(path: Path) -> None:
    board = SharedCounters(path, 0)
    nodes = [node("a", "east"), node("b", "west")]
    board.join(nodes)
    for number in range(100):
        nodes[0].take(NodeWork(tokens=1, destination=f"old {number}", promised_bytes=1))
    board.catch_up(nodes)
    assert nodes[0].pending_tokens == 100
    board.close()


def test_numbers_are_given_out_once_and_states_are_told(path: Path) -> None:
    one, other = SharedCounters(path, 0), SharedCounters(path, 2)
    assert [board.next_seq() for board in (one, other, one)] == [1, 2, 3]
    assert other.last_seq() == 3
    other.be(WorkerState.READY)
    assert one.states() == [WorkerState.NONE, WorkerState.NONE, WorkerState.READY]
    for board in (one, other):
        board.close()


def test_what_a_node_still_has_when_it_is_let_go_of_does_not_stay_with_the_one_that_follows_it(path: Path) -> None:
    board = SharedCounters(path, 0)
    former, successor = node("a", "east"), node("a", "east")
    work = NodeWork(tokens=100, destination="west", promised_bytes=5_000)
    board.join([former])
    former.take(work)
    board.join([successor])
    board.leave(former)  # as when its requests took longer than a drain may
    board.catch_up([successor])
    assert (successor.pending_requests, successor.pending_tokens) == (1, 100)
    former.give_back(work)
    board.catch_up([successor])
    assert (successor.pending_requests, successor.pending_tokens, dict(successor.promised_bytes)) == (0, 0, {})
    board.close()


def test_work_that_outlives_its_column_is_not_counted_for_the_next_node_in_it(path: Path) -> None:
    board = SharedCounters(path, 0)
    former, successor, stranger = node("a", "east"), node("a", "east"), node("b", "east")
    work = NodeWork(tokens=100)
    board.join([former])
    former.take(work)
    board.join([successor])
    board.leave(former)
    board.leave(successor)
    board.join([stranger])
    former.give_back(work)
    former.prefill_share.add(1.0, 1_000.0)
    board.catch_up([stranger])
    assert (stranger.pending_requests, stranger.pending_tokens) == (0, 0)
    assert stranger.prefill_share.at(1_000.0) == 0.0
    board.close()


def test_promises_of_a_node_that_moves_are_seen_until_it_has_moved(path: Path) -> None:
    board = SharedCounters(path, 0)
    former, silent, receiver = node("a", "east"), node("a", "east"), node("b", "west")
    board.join([former, receiver])
    board.join([silent])  # at the new address, where no agent answers yet
    former.take(NodeWork(tokens=100, destination="west", promised_bytes=5_000))
    board.catch_up([former, receiver])
    assert dict(former.promised_bytes) == {"west": 5_000}
    board.close()

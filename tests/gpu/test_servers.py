"""What parts B to D make of answers. The parts themselves: `python -m tests.gpu --device cpu --parts B,C,D`, with vLLM."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gpu.answers import TimedAnswer, compared, complaints, equal_until, missed
from tests.gpu.rounds import engine_of, is_one_of
from tests.gpu.settings import CPU, CUDA, document, length_inside, lengths_at_blocks, why_not
from tests.gpu.times import TimedRows
from transport.control.proto import node_pb2 as pb

SLOW, QUICK = TimedAnswer([1, 2, 3], [2.0, 3.0, 4.0]), TimedAnswer([1, 2, 3], [1.0, 1.5, 2.0])
EQUAL = {
    "tokens": 9, "loaded": 8, "equal": 4, "repeats": 4, "of": 4, "bytes": 7, "layout": 7, "fallbacks": [], "judged": True,
}  # fmt: skip


def test_times_are_compared_with_those_of_a_plain_server() -> None:
    row = compared([SLOW], [QUICK])
    assert (row["ttft_s"], row["itl_p50"], row["itl_p99"]) == (2.0, 2.0, 2.0)


def test_the_rate_of_a_prefill_is_that_of_its_own_server() -> None:
    row = TimedRows([SLOW], [QUICK], prefills_s=[1.25], overlaps=[0.5]).figures(9)
    assert (row["prefill"], row["overlap"], row["tokens"]) == (0.8, 0.5, 9)


def test_what_keeps_its_limits_has_missed_none() -> None:
    row = {"tokens": 9, "prefill": 0.97, "itl_p50": 1.03, "itl_p99": 1.1, "overlap": 0.9}
    assert missed(row, is_longest=True) == []


@pytest.mark.parametrize("change", [{"prefill": 0.96}, {"itl_p50": 1.04}, {"itl_p99": 1.2}, {"overlap": 0.5}])
def test_a_limit_that_is_missed_is_named(change: dict[str, float]) -> None:
    row = {"tokens": 9, "prefill": 1.0, "itl_p50": 1.0, "itl_p99": 1.0, "overlap": 1.0} | change
    (name,) = change
    assert name in missed(row, is_longest=True)[0]
    assert bool(missed(row, is_longest=False)) is (name != "overlap")


def test_an_answer_in_one_piece_says_nothing_of_intervals() -> None:
    row = {"tokens": 9, "prefill": 1.0, "overlap": 1.0} | compared([TimedAnswer([1, 2], [1.0])], [QUICK])
    assert any("itl_p50 is not known" in why for why in missed(row, is_longest=True))


def test_equal_tokens_and_bytes_are_no_complaint() -> None:
    assert complaints(EQUAL) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"equal": 3}, "part at token 3"),
        ({"equal": 1, "repeats": 1}, "nothing is shown"),
        ({"bytes": 6}, "6 of 7 bytes"),
        ({"fallbacks": ["late"]}, "late"),
        ({"loaded": 0}, "loaded 0 of the prompt"),
    ],
)
def test_what_is_wrong_with_a_row_is_said(change: dict[str, object], said: str) -> None:
    (why,) = complaints(EQUAL | change)
    assert said in why


@pytest.mark.parametrize("change", [{"equal": 3, "repeats": 3}, {"equal": 3, "judged": False}])
def test_no_more_is_asked_of_two_servers_than_of_one(change: dict[str, object]) -> None:
    assert complaints(EQUAL | change) == []


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_answers_are_equal_until_they_part(ours: list[int], theirs: list[int]) -> None:
    until = equal_until(ours, theirs)
    assert ours[:until] == theirs[:until]
    assert until == min(len(ours), len(theirs)) or ours[until] != theirs[until]


@given(st.lists(st.integers(1, 30_000), min_size=1).map(tuple), st.integers(2, 4096))
def test_prompts_leave_one_token_behind_whole_blocks(lengths: tuple[int, ...], block: int) -> None:
    assert all(length % block == 1 and length > block for length in lengths_at_blocks(lengths, block))
    assert (length_inside(lengths, block) - 1) % block


def test_a_device_that_is_not_there_is_a_reason(tmp_path) -> None:
    assert why_not(CUDA)
    assert document(tmp_path, CPU, start_s=9.0)["node"]["chunk_tokens"] == CPU.chunk_tokens


def test_servers_for_times_have_the_graphs_that_those_for_tokens_go_without() -> None:
    assert "--enforce-eager" in CUDA.flags_for("llama_70b")
    assert "--enforce-eager" not in CUDA.flags_for("llama_70b", timed=True)


def test_no_engine_is_nothing_to_kill() -> None:
    assert engine_of(pb.NodeDescription(node_id="far", engine_pid=7)) == 7
    with pytest.raises(RuntimeError, match="far has no engine to kill"):
        engine_of(pb.NodeDescription(node_id="far"))


@pytest.mark.parametrize(
    ("found", "is_right"), [([1, 2, 3, 4], True), ([1, 2, 9, 9], True), ([1, 9, 3, 4], False), ([9, 2, 3, 4], False)]
)
def test_an_answer_is_held_to_what_no_cut_changes(found: list[int], is_right: bool) -> None:
    assert is_one_of(found, [[1, 2, 3, 4], [1, 2, 8, 8]]) is is_right
    assert not is_one_of(found, [[1, 2], [2, 2]]), "two that share nothing show nothing"

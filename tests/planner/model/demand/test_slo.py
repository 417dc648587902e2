import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import InputError
from planner.model.demand.slo import Slo, TtftTarget, fastest, members, parsed_target
from transport.control.settings import SettingsError

PROMPTS = np.array([100.0, 8000.0, 8001.0, 60_000.0])


def test_a_target_is_of_a_category_of_lengths_or_of_both():
    names = np.array(["chat", "file", "chat", "chat"])
    assert members(TtftTarget(ttft_s=1), PROMPTS, None).all()
    assert members(TtftTarget(ttft_s=1, up_to_tokens=8000), PROMPTS, None).tolist() == [True, True, False, False]
    long_chats = TtftTarget(ttft_s=1, above_tokens=8000, up_to_tokens=10_000, category="chat")
    assert members(long_chats, PROMPTS, names).tolist() == [False, False, True, False]
    assert not members(long_chats, PROMPTS, None).any()
    assert long_chats.name == "chat above 8,000 tokens up to 10,000 tokens"


def test_of_several_targets_the_earliest_counts():
    targets = (TtftTarget(ttft_s=2, up_to_tokens=8000), TtftTarget(ttft_s=1, above_tokens=100, up_to_tokens=8001))
    assert fastest(targets, PROMPTS, None, 30.0).tolist() == [2, 1, 1, 30]


@given(
    st.lists(st.tuples(st.floats(0.1, 60), st.integers(0, 100_000), st.integers(1, 100_000)), max_size=5),
    st.floats(1, 99),
)
def test_no_request_waits_longer_than_one_of_its_targets(drawn, otherwise_s):
    targets = tuple(TtftTarget(ttft_s=s, above_tokens=low, up_to_tokens=low + more) for s, low, more in drawn)
    found = fastest(targets, PROMPTS, None, otherwise_s)
    for target in targets:
        assert (found[members(target, PROMPTS, None)] <= target.ttft_s).all()
    assert set(found) <= {otherwise_s, *(target.ttft_s for target in targets)}


def test_a_target_of_the_command_line_has_the_keys_of_the_site_file():
    found = parsed_target("ttft_s=2, up_to_tokens=8000,category=first turn,share=0.95")
    assert found == TtftTarget(ttft_s=2, up_to_tokens=8000, category="first turn", share=0.95)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("up_to_tokens=8000", "missing: ttft_s"),
        ("2", "key=value"),
        ("ttft_s=2,ttft_s=3", "there once"),
        ("ttft_s=fast", "ttft_s = 'fast'"),
        ("ttft_s=0", "above 0"),
        ("ttft_s=2,share=1", "share = 1.0"),
        ("ttft_s=2,above_tokens=9,up_to_tokens=9", "more than above_tokens, 9"),
        ("ttft_s=2,category=", "category = ''"),
    ],
)
def test_a_wrong_target_is_named(text, why):
    with pytest.raises(InputError, match=why.replace("(", r"\(")) as caught:
        parsed_target(text)
    assert text in str(caught.value)


def test_targets_differ_in_their_requests():
    with pytest.raises(SettingsError, match="of different requests"):
        Slo(targets=(TtftTarget(ttft_s=1, category="chat"), TtftTarget(ttft_s=2, category="chat")))
    with pytest.raises(SettingsError, match="at most 16"):
        Slo(targets=tuple(TtftTarget(ttft_s=1, up_to_tokens=at) for at in range(1, 18)))


def test_that_of_all_requests_comes_first():
    assert [each.name for each in Slo(ttft_p90_s=5, targets=(TtftTarget(ttft_s=1, category="a"),)).ttft_targets] == [
        "all",
        "a",
    ]
    assert Slo().ttft_targets == ()

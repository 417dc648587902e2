"""Trace context: a caller's trace goes on, nonsense begins one of its own."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.request.trace_context import TraceContext, trace_under

CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_a_callers_trace_goes_on() -> None:
    found = trace_under(CALLER, 0.0, random.Random(1))
    assert (found.trace, found.parent) == (0x4BF92F3577B34DA6A3CE929D0E0E4736, 0xF067AA0BA902B7)
    assert found.is_sampled  # the caller's decision, not ours
    assert found.header == f"00-4bf92f3577b34da6a3ce929d0e0e4736-{found.span:016x}-01"
    assert not trace_under(CALLER[:-1] + "0", 1.0, random.Random(1)).is_sampled


@pytest.mark.parametrize(
    "header",
    [
        None, "", "00-1-2-01", CALLER.upper(), CALLER + "-more", "ff" + CALLER[2:], "00-" + "0" * 32 + CALLER[35:],
        CALLER[:36] + "0" * 16 + "-01", CALLER.replace("-", "_"), "00-٤bf92f3577b34da6a3ce929d0e0e473-00f067aa0ba902b7-01",
    ],
)  # fmt: skip
def test_nonsense_begins_a_trace_of_its_own(header: str | None) -> None:
    found = trace_under(header, 1.0, random.Random(1))
    assert found.parent == 0
    assert found.trace
    assert found.span
    assert found.is_sampled


def test_later_versions_may_say_more() -> None:
    assert trace_under("01" + CALLER[2:] + "-more", 1.0, random.Random(1)).parent == 0xF067AA0BA902B7


@given(text=st.text(), sample=st.floats(0, 1))
def test_whatever_comes_there_is_a_header(text: str, sample: float) -> None:
    trace = trace_under(text, sample, random.Random(2))
    assert trace_under(trace.header, 0.5, random.Random(3)).parent == trace.span


def test_a_share_is_sampled() -> None:
    rng = random.Random(5)
    assert 150 < sum(trace_under(None, 0.2, rng).is_sampled for _ in range(1000)) < 250


def test_several_answers_of_one_call_are_beside_each_other() -> None:
    first = TraceContext(7, 8, 9)
    other = first.beside()
    assert (other.trace, other.parent) == (7, 9)
    assert other.span != 8

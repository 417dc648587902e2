from hypothesis import given
from hypothesis import strategies as st

from planner.decisions.estimates.coding import FORGET_S, CodingEstimate
from tests.planner.worlds import GB, link

MB = 1_000_000
WAITED_S = 1.0


def learned(*transfers: tuple[int, int], now: float = 0.0) -> CodingEstimate:
    found = CodingEstimate()
    for plain, saved in transfers:
        found.observe(plain, saved, WAITED_S, now)
    return found


def test_what_coding_saves_is_learned():
    assert CodingEstimate().ratio(0.0) == 1.0
    assert learned((100 * MB, 40 * MB)).ratio(0.0) == 0.6
    assert round(learned((100 * MB, 40 * MB), (300 * MB, 0)).ratio(0.0), 2) == 0.9


def test_transfers_that_waited_for_nothing_say_nothing_of_coding():
    found = learned((100 * MB, 40 * MB))
    found.observe(900 * MB, 0, 0.01, 0.0)
    assert found.ratio(0.0) == 0.6


def test_what_was_saved_long_ago_is_not_hoped_for():
    found = learned((100 * MB, 50 * MB))
    assert found.ratio(FORGET_S / 2) == 0.75
    assert found.ratio(FORGET_S) == found.ratio(9 * FORGET_S) == 1.0


@given(
    st.lists(
        st.tuples(st.integers(-1, 10**12), st.integers(-1, 10**12), st.floats(-1, 100), st.floats(0, 1000)), max_size=20
    )
)
def test_a_ratio_is_a_share(transfers):
    found, now = CodingEstimate(), 0.0
    for plain, saved, waited_s, passed_s in transfers:
        now += passed_s
        found.observe(plain, saved, waited_s, now)
        assert 0 <= found.ratio(now) <= 1


def test_only_a_link_that_binds_is_predicted_to_code():
    coding = link(available_bytes_per_s=1 * GB, coded_ratio=0.5)
    assert coding.sent_s(GB // 10) == 0.1
    assert coding.coded_bytes(GB // 10) == GB // 10
    assert coding.sent_s(4 * GB) == 2.0
    assert coding.coded_bytes(4 * GB) == 2 * GB
    assert coding.sent_s(GB // 4) == 0.2  # no sooner than what is sent plain until then

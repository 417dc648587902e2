"""KeptArrivals that a workload keeps."""

import json

import numpy as np
import pytest

from planner.errors import InputError
from planner.model.fitting import arrivals_of, fit
from planner.model.site import read_fitted
from planner.model.trace_files.arrivals import COLUMNS, MOST, KeptArrivals, busiest
from planner.model.workload import read_trace
from tests.planner.traces import MOONCAKE
from transport.control.settings import SettingsError


def test_what_fit_writes_is_read_again(tmp_path):
    trace = read_trace(MOONCAKE)
    path = tmp_path / "workload.json"
    path.write_text(json.dumps(fit(trace, None)))
    found, kept = read_fitted(path).arrivals, arrivals_of(trace, None)
    assert found is not None
    assert kept is not None
    assert found.rate_req_per_s == pytest.approx(len(trace) / trace.span_s)
    for name in COLUMNS:
        assert getattr(found, name) == pytest.approx(getattr(kept, name), abs=1e-3)


def test_a_workload_of_before_has_none(tmp_path):
    table = fit(read_trace(MOONCAKE), None)
    del table["arrivals"]
    path = tmp_path / "workload.json"
    path.write_text(json.dumps(table))
    assert read_fitted(path).arrivals is None


def test_a_workload_without_blocks_sessions_and_categories_is_read(tmp_path):
    """As they were written before these were kept."""
    table = fit(read_trace(MOONCAKE), None)
    for name in ("category", "shared_blocks", "sessions"):
        table["arrivals"].pop(name, None)
    path = tmp_path / "workload.json"
    path.write_text(json.dumps(table))
    found = read_fitted(path).arrivals
    assert found is not None
    assert (found.category, found.shared_blocks, found.sessions) == (None, None, None)


def test_a_category_that_has_no_name_is_refused(tmp_path):
    table = fit(read_trace(MOONCAKE), None)
    table["arrivals"]["category"][0] = 2
    path = tmp_path / "workload.json"
    path.write_text(json.dumps(table))
    with pytest.raises(InputError, match=r"arrivals.category = 2.*2 categories"):
        read_fitted(path)


def test_of_many_requests_the_busiest_are_kept():
    times = np.concatenate([np.arange(100.0), 100 + np.arange(50) / 10, 200 + np.arange(100.0)])
    assert busiest(times, 50) == slice(100, 150)
    assert busiest(times, 1_000) == slice(0, 250)
    assert busiest(np.arange(MOST + 5.0)).stop - busiest(np.arange(MOST + 5.0)).start == MOST


def test_they_come_faster_at_a_higher_rate():
    column = np.ones(3)
    columns = dict.fromkeys(COLUMNS, column) | {"arrival_s": np.array([10.0, 12.0, 16.0])}
    kept = KeptArrivals(rate_req_per_s=0.5, **columns)
    assert kept.at(1.0) == pytest.approx([0.0, 1.0, 3.0])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"arrival_s": [1.0, 0.5]}, "arrival_s"),
        ({"arrival_s": [1.0, 1.0]}, "arrival_s"),
        ({"output": [5.0]}, "output"),
        ({"held": [0.0, 2.0]}, "held"),
        ({"landed": None}, "landed"),
        ({"rate_req_per_s": 0}, "rate_req_per_s"),
    ],
)
def test_columns_that_make_no_sense_are_named(change, named):
    table = {"rate_req_per_s": 1.0, **{name: [0.0, 1.0] for name in COLUMNS}}
    KeptArrivals.read(table)
    with pytest.raises(SettingsError, match=named):
        KeptArrivals.read(table | change)

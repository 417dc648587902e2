"""A server's page of metrics."""

import pytest

from gateway.picker.reports import read_report
from gateway.picker.servers import ServerReport

PAGE = """# HELP vllm:num_requests_running Number of requests
vllm:num_requests_running{engine="0",model_name="a } b"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_running_total 99
vllm:num_requests_waiting 4
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5 1700000000
"""


def test_engines_of_one_server_are_added_up() -> None:
    assert read_report(PAGE) == ServerReport(running=5, waiting=4, kv_usage=0.5)


def test_a_page_without_them_says_nothing() -> None:
    assert read_report("up 1\n") == ServerReport()


@pytest.mark.parametrize("line", ["vllm:num_requests_running", 'vllm:num_requests_waiting{a="b"} many'])
def test_what_is_no_number_is_an_error(line: str) -> None:
    with pytest.raises((ValueError, IndexError)):
        read_report(line)

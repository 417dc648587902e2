"""What the page says."""

from gateway.picker.exchange import EndpointChoice, Refusal
from gateway.picker.metrics import PickerMetrics

CHOICE = EndpointChoice(("a:1", "b:2"))


def test_answers_of_other_servers_are_counted_with_a_reason() -> None:
    metrics = PickerMetrics()
    for served in ("a:1", "", "b:2", "c:3"):
        metrics.answered(served, CHOICE)
    page = metrics.page().decode()
    for reason in ("listed", "proxy"):
        assert f'prfaas_picker_fallbacks_total{{reason="{reason}"}} 1.0' in page


def test_picks_are_counted_by_what_came_of_them() -> None:
    metrics = PickerMetrics()
    for found in (
        CHOICE,
        EndpointChoice(("a:1",), "p:1"),
        Refusal(status=400, text="no"),
        Refusal(status=429, text="", reason="r"),
    ):
        metrics.picked(found)
    page = metrics.page().decode()
    for outcome in ("picked", "prefill_apart", "refused_400", "r"):
        assert f'prfaas_picker_requests_total{{outcome="{outcome}"}} 1.0' in page


def test_files_of_certificates_that_cannot_be_used_are_counted() -> None:
    metrics = PickerMetrics()
    metrics.certificate_failed("unusable")
    assert 'prfaas_picker_certificate_failures_total{reason="unusable"} 1.0' in metrics.page().decode()

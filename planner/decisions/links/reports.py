"""What the sender of a line reports of it, live or simulated.

Its utilisation is a share of the bandwidth that it measures. A sender that its budget holds back measures none: then it is a
share of the budget, which is what binds.
"""

from typing import Protocol


class SenderReport(Protocol):
    """What a sender says of its egress to a cluster. Rates and round trips are 0 while unknown."""

    @property
    def available_bytes_per_s(self) -> float: ...
    @property
    def budget_bytes_per_s(self) -> float: ...
    @property
    def utilisation(self) -> float: ...
    @property
    def retransmit_ratio(self) -> float: ...
    @property
    def queued_bytes(self) -> float: ...
    @property
    def congested(self) -> bool: ...
    @property
    def inflated(self) -> bool: ...
    @property
    def rtt_s(self) -> float: ...
    @property
    def min_rtt_s(self) -> float: ...
    @property
    def estimate_error(self) -> float: ...


def carried_bytes_per_s(report: SenderReport) -> float:
    """What it sends, on average."""
    return (report.available_bytes_per_s or report.budget_bytes_per_s) * report.utilisation

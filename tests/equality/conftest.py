from collections import Counter
from collections.abc import Iterator

import pytest

SENT_HOME = "sent_home"


@pytest.fixture
def sent_home(request: pytest.FixtureRequest) -> Iterator[Counter[str]]:
    """Counts, by reason, the prompts of a test that load sent home; the end of the run says how many there were."""
    counts: Counter[str] = Counter()
    yield counts
    if counts:
        request.node.user_properties.append((SENT_HOME, dict(counts)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Also with several workers: properties travel with the reports of tests."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    total: Counter[str] = Counter()
    for report in reports:
        if isinstance(report, pytest.TestReport) and report.when == "teardown":
            for name, counts in report.user_properties:
                if name == SENT_HOME and isinstance(counts, dict):
                    total.update(counts)
    if total:
        terminalreporter.write_line(f"{total.total()} prompts were sent home by load and asked anew: {dict(total)}")

import logging

import pytest

from transport.receive.few_lines import EVERY_S, MAX_LINES, FewLines


def test_lines_beyond_some_are_counted_instead(caplog: pytest.LogCaptureFixture) -> None:
    few = FewLines(logging.getLogger("few"))
    for number in range(1000):
        few.warning(5.0, "stranger %d", number)
    assert caplog.messages == [f"stranger {number}" for number in range(MAX_LINES)]
    few.warning(5.0 + EVERY_S, "another")
    assert caplog.messages[MAX_LINES:] == [f"{1000 - MAX_LINES} more lines like the following were left out", "another"]

"""Lines are written some at a time, in their order, and none is lost."""

import io
import json
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gateway.telemetry.log_setup import JsonFormatter, LineWriter

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (\w+) prfaas.test (.*)")


@contextmanager
def logger(stream: io.StringIO) -> Iterator[logging.Logger]:
    log, writer = logging.Logger("prfaas.test"), LineWriter(stream)
    log.addHandler(writer)
    try:
        yield log
    finally:
        writer.close()


def lines(stream: io.StringIO) -> list[tuple[str, str]]:
    found = [LINE.fullmatch(line) for line in stream.getvalue().splitlines()]
    return [(match[1], match[2]) for match in found if match]


def test_a_warning_is_written_at_once_and_what_came_before_it_first() -> None:
    stream = io.StringIO()
    with logger(stream) as log:
        log.info("one %d", 1)
        log.warning("two")
        assert lines(stream) == [("INFO", "one 1"), ("WARNING", "two")]


def test_what_waits_is_written_when_the_process_ends() -> None:
    stream = io.StringIO()
    with logger(stream) as log:
        log.info("last")
    assert lines(stream) == [("INFO", "last")]


def test_no_line_of_any_thread_is_lost() -> None:
    stream = io.StringIO()
    with logger(stream) as log:
        threads = [threading.Thread(target=lambda: [log.info("x") for _ in range(2500)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert lines(stream) == [("INFO", "x")] * 10_000


def test_a_line_that_cannot_be_made_costs_no_other_line(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    with logger(stream) as log:
        log.info("one")
        log.warning("%d", "not a number")
        log.info("two")
    assert lines(stream) == [("INFO", "one"), ("INFO", "two")]
    assert "not a number" in capsys.readouterr().err


def test_who_logs_while_a_line_is_made_waits_for_nobody() -> None:
    stream = io.StringIO()
    with logger(stream) as log:

        class Talkative:
            """Such as what is collected meanwhile, and complains."""

            def __str__(self) -> str:
                log.warning("inner")
                return "outer"

        thread = threading.Thread(target=lambda: log.warning("%s", Talkative()), daemon=True)
        thread.start()
        thread.join(30.0)
        assert lines(stream) == [("WARNING", "outer"), ("WARNING", "inner")]


def test_a_stream_that_is_closed_ends_nothing() -> None:
    stream = io.StringIO()
    with logger(stream) as log:
        stream.close()
        log.warning("an unread line")


def test_each_record_is_an_object() -> None:
    stream = io.StringIO()
    log, writer = logging.Logger("prfaas.test"), LineWriter(stream, JsonFormatter())
    log.addHandler(writer)
    try:
        log.info('a "quoted"\nline of %s', "ä")
        raise ValueError("odd")
    except ValueError:
        log.exception("it broke")
    finally:
        writer.close()
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["level"], first["logger"], first["message"]) == ("INFO", "prfaas.test", 'a "quoted"\nline of ä')
    assert "ValueError: odd" in second["exception"]

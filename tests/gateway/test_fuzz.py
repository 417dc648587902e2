"""A few inputs of the fuzzer for each run; `make fuzz` gives many."""

import asyncio

from tests.gateway.fuzz import Found, bodies, streams

INPUTS = 250


def test_bodies_that_nobody_meant_are_answered_as_they_should_be() -> None:
    found = Found()
    asyncio.run(bodies(INPUTS, 20261125, found))
    assert not found.wrong
    assert sum(found.statuses.values()) == 2 * INPUTS


def test_streams_that_no_engine_should_say_raise_nothing_unforeseen() -> None:
    found = Found()
    streams(INPUTS, 20261125, found)
    assert not found.wrong

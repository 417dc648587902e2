"""Strange callers, agents and tickets: nothing is raised, nothing stays, and honest callers are answered."""

import asyncio
import math
from dataclasses import replace
from pathlib import Path

import pytest
import uvloop

from tests.node.fuzz_calls import fuzz, issued
from transport.send.spec import TransferSpec

NUM_INPUTS = 500


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("secured", [False, True], ids=["clear", "tls"])
def test_calls_and_tickets_of_every_kind(loop: object, secured: bool, tmp_path: Path) -> None:
    """More of them, on both loops, are `make fuzz`."""
    with asyncio.Runner(loop_factory=loop) as runner:  # type: ignore[arg-type]
        counts = runner.run(fuzz(NUM_INPUTS, seed=11, certificates=issued(tmp_path) if secured else None))
    assert counts["answered"]
    assert counts["ended:garbled"]
    assert counts["ended:stalled"]
    assert counts["ticket tried"]


@pytest.mark.parametrize(
    "wrong",
    [{"weight": 0.0}, {"weight": math.nan}, {"weight": math.inf}, {"due_s": math.nan}, {"deadline_s": math.nan}],
)
def test_a_transfer_has_times_and_a_weight_that_can_be_compared(wrong: dict[str, float]) -> None:
    spec = TransferSpec("127.0.0.1:1", "t", b"s", [1])
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replace(spec, **wrong)

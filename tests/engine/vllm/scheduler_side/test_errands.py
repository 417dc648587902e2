"""What ranks have written of a job, put together."""

from engine.vllm.scheduler_side.errands import Errand
from engine.vllm.scheduler_side.steps import LayerWritten, StepWritten
from tests.engine.vllm.builders import BLOCK, full, layout_of
from transport.control.messages import LayerDone

LAYOUT = layout_of(
    full("l.0", part_bytes=32 * BLOCK, parts=2), full("l.1", part_bytes=32 * BLOCK, parts=2), ranks=2, stages=2
)


def written(layer: int, num_tokens: int) -> LayerWritten:
    return LayerWritten(job="j", group=0, layer=layer, num_tokens=num_tokens)


def test_a_layer_leaves_when_the_ranks_of_its_stage_have_written_it() -> None:
    errand = Errand(1, 3 * BLOCK)
    assert errand.layer_written(LAYOUT, 0, written(0, BLOCK)) is None
    assert errand.layer_written(LAYOUT, 1, written(0, BLOCK)) == LayerDone(job="j", group=0, layer=0, num_tokens=BLOCK)
    # The first stage is a chunk ahead by now, and the second one's layer is that of the chunk before.
    assert errand.layer_written(LAYOUT, 0, written(0, 2 * BLOCK)) is None
    assert errand.layer_written(LAYOUT, 3, written(1, BLOCK)) is None
    assert errand.layer_written(LAYOUT, 2, written(1, BLOCK)) == LayerDone(job="j", group=0, layer=1, num_tokens=BLOCK)


def test_a_job_is_written_when_every_rank_of_every_stage_has_said_so() -> None:
    errand = Errand(1, BLOCK)
    done = [errand.step_written(LAYOUT, rank, StepWritten(job="j", num_tokens=BLOCK)) for rank in (0, 1, 3, 2)]
    assert done == [False, False, False, True]


def test_layers_that_no_rank_or_not_every_writer_has_written_are_known() -> None:
    errand = Errand(1, BLOCK)
    assert errand.unwritten(LAYOUT) == ("l.0", "l.1")
    errand.layer_written(LAYOUT, 0, written(0, BLOCK))
    errand.layer_written(LAYOUT, 2, written(1, BLOCK))
    errand.layer_written(LAYOUT, 3, written(1, BLOCK - 1))
    assert errand.unwritten(LAYOUT) == ("l.0", "l.1")
    errand.layer_written(LAYOUT, 1, written(0, BLOCK))
    assert errand.unwritten(LAYOUT) == ("l.1",)
    errand.layer_written(LAYOUT, 3, written(1, BLOCK))
    assert errand.unwritten(LAYOUT) == ()

"""What one stage does with what it hears, beside the layers that it computes."""

import socket

import pytest

from engine.agent.job_pages import MappedArena
from engine.emulated.emulated import emulated_layout
from engine.errors import PagesInvalid
from engine.staged.messages import Begin, Done, LoadPages, SequencePages, StageFailure, receive_from_stage
from engine.staged.permits import Permits
from engine.staged.stage import Stage, StagePlace
from tests.engine.builders import BLOCK, job_pages


class Loading:
    """A share that fails to load a prefix with `error`."""

    layout = emulated_layout("llama", BLOCK)

    def __init__(self, error):
        self.error = error

    def new_sequence(self, expected_tokens, is_wanted):
        return None

    def load(self, state, kv, num_tokens):
        raise self.error


@pytest.fixture
def told(tmp_path):
    """What a stage tells its engine of a prefix, which it fails to load."""
    permits = Permits.create(1)
    ours, theirs = socket.socketpair()

    def told(error):
        share = Loading(error)
        pages = job_pages(share.layout, BLOCK)
        path = tmp_path / "arena"
        path.write_bytes(bytes(share.layout.page_bytes * 64))
        place = MappedArena.open(path, share.layout.page_bytes, 64).place
        stage = Stage(share, StagePlace(0, theirs, None, theirs, permits))
        for message in (Begin(1, 0, BLOCK), SequencePages(1, *place, pages), LoadPages(1, BLOCK)):
            stage.hear(message, bytearray())
        return [receive_from_stage(ours).message for _ in range(2)]

    with ours, theirs:
        yield told
    permits.close()


def test_pages_that_are_taken_back_while_a_prefix_is_loaded_are_no_error_of_the_stage(told, caplog):
    gone = PagesInvalid("the pages are no longer ours")
    assert told(gone) == [StageFailure(1, "pages_invalid", f"PagesInvalid: {gone}"), Done(1)]
    assert not caplog.records


def test_what_fails_otherwise_is_logged_with_where_it_came_from(told, caplog):
    assert told(ValueError("shapes")) == [StageFailure(1, "failed", "ValueError: shapes"), Done(1)]
    assert [(record.levelname, bool(record.exc_info)) for record in caplog.records] == [("ERROR", True)]

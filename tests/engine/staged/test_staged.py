"""An engine in stages over real processes: the pages and tokens of one process, and what becomes of all that goes wrong."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.agent.job_pages import JobKV, MappedArena
from engine.errors import ModelError, PrefillAborted, StageDied, TransferError
from engine.staged.staged import StagedEngine
from tests.engine.builders import BLOCK, job_pages, random_tokens

pytestmark = pytest.mark.slow  # each engine is two processes that import torch

PATIENCE_S = 60.0


class Bench:
    """An engine in stages, and a caller that waits for it as a scheduler does."""

    def __init__(self, engine: StagedEngine) -> None:
        self.engine = engine
        self._progress = threading.Event()
        engine.listen(self._progress.set)

    def wait(self, holds: Any) -> None:
        while not holds():
            assert self._progress.wait(PATIENCE_S), "nothing has happened for long"
            self._progress.clear()

    def prefill(self, tokens, kv, start=0, chunk=2 * BLOCK, sequence=None):
        """Hands over all chunks of tokens [start, all), each when there is room for it."""
        sequence = self.engine.new_sequence(len(tokens)) if sequence is None else sequence
        if start:
            self.engine.load(sequence, kv, start)
        while sequence.num_tokens < len(tokens):
            self.wait(lambda: self.engine.takes_more)
            here = sequence.num_tokens
            lengths = [length for length in kv.snapshot_lengths if length > here] if kv else []
            self.engine.prefill(sequence, tokens[here : min([len(tokens), here + chunk, *lengths])], kv)
        return sequence

    def settle(self, sequence):
        self.wait(lambda: self.engine.settled(sequence))


@pytest.fixture(scope="module")
def arch() -> str:
    return "kimi_linear"  # states and full attention; the others: test_share, and `make test-equality`


@pytest.fixture(scope="module")
def bench(arch, model_dir) -> Iterator[Bench]:
    engine = StagedEngine.load_directory(model_dir(arch), stages=2, block_size=BLOCK)
    yield Bench(engine)
    engine.close()


def file_arena(folder: Path, layout, pages) -> MappedArena:
    used = [page for group in pages.blocks for block in group for page in block]
    used += [page for group in pages.states for snapshot in group.values() for page in snapshot]
    path = folder / f"arena-{len(list(folder.iterdir()))}"
    path.write_bytes(bytes(layout.page_bytes * (max(used) + 1)))
    return MappedArena.open(path, layout.page_bytes, max(used) + 1)


def whole_pages(engine, tokens, pages, arena, chunk=2 * BLOCK):
    kv = JobKV(engine.layout, arena, pages)
    sequence = engine.new_sequence(len(tokens))
    while sequence.num_tokens < len(tokens):
        here = sequence.num_tokens
        stop = min([len(tokens), here + chunk, *(length for length in kv.snapshot_lengths if length > here)])
        engine.prefill(sequence, tokens[here:stop], kv)
    return sequence


def test_layout_and_identity_are_those_of_the_whole_model(bench, arch, engine_of):
    whole = engine_of(arch)
    assert bench.engine.layout == whole.layout
    assert bench.engine.layout.fingerprint == whole.layout.fingerprint
    assert (bench.engine.max_model_len, bench.engine.vocab_size) == (whole.max_model_len, whole.vocab_size)


def test_prompts_at_once_leave_the_pages_of_one_process(bench, arch, engine_of, tmp_path):
    whole, sequences, found, expected = engine_of(arch), [], [], []
    for length in (3 * BLOCK + 5, 2 * BLOCK, 5 * BLOCK - 1):
        tokens = random_tokens(length)
        pages = job_pages(whole.layout, length, lengths=[length // BLOCK * BLOCK])
        found.append(file_arena(tmp_path, whole.layout, pages))
        expected.append(file_arena(tmp_path, whole.layout, pages))
        sequences.append(bench.prefill(tokens, JobKV(whole.layout, found[-1], pages)))
        whole_pages(whole, tokens, pages, expected[-1])
    for sequence in sequences:
        bench.settle(sequence)
    assert all(np.array_equal(one.data, other.data) for one, other in zip(found, expected, strict=True))


def test_all_that_was_written_is_told_before_a_prompt_settles(bench, engine_of, arch, tmp_path):
    layout, tokens, told = bench.engine.layout, random_tokens(5 * BLOCK), []
    pages = job_pages(layout, len(tokens))
    kv = JobKV(
        layout, file_arena(tmp_path, layout, pages), pages,
        on_layer=lambda *done: told.append(("layer", *done)), on_state=lambda *done: told.append(("state", *done)),
    )  # fmt: skip
    bench.settle(bench.prefill(tokens, kv))
    for number in range(len(layout.groups)):
        for layer in layout.groups[number].layers:
            kind = "state" if number in layout.state_groups else "layer"
            of_layer = [length for what, *where, length in told if (what, *where) == (kind, number, layer)]
            assert of_layer == ([len(tokens)] if kind == "state" else [2 * BLOCK, 4 * BLOCK, 5 * BLOCK])


def test_a_loaded_prefix_and_answers_have_the_bits_of_one_process(bench, arch, engine_of, tmp_path):
    whole, tokens, cached = engine_of(arch), random_tokens(3 * BLOCK + 9), 2 * BLOCK
    pages = job_pages(whole.layout, len(tokens), lengths=[cached])
    arena, expected = (file_arena(tmp_path, whole.layout, pages) for _ in range(2))
    reference = whole_pages(whole, tokens, pages, expected)
    bench.settle(bench.prefill(tokens[:cached], JobKV(whole.layout, arena, pages)))
    sequences = [bench.prefill(tokens, JobKV(whole.layout, arena, pages), start=cached) for _ in range(2)]
    for sequence in sequences:
        bench.settle(sequence)
    assert np.array_equal(arena.data, expected.data)
    for token in (7, 8):
        logits = whole.decode([reference], [token])[0]
        assert all(np.array_equal(each, logits) for each in bench.engine.decode(sequences, [token] * 2))


def test_what_is_given_up_is_written_no_more_and_forgotten(bench, tmp_path):
    layout, tokens = bench.engine.layout, random_tokens(8 * BLOCK)
    pages = job_pages(layout, len(tokens))
    arena = file_arena(tmp_path, layout, pages)
    kv = JobKV(layout, arena, pages)
    sequence = bench.engine.new_sequence(len(tokens))
    bench.engine.prefill(sequence, tokens, kv)
    kv.revoke()
    arena.data[:] = 7  # as the next borrower of the pages does
    bench.settle(sequence)
    assert (arena.data == 7).all()


def test_a_cancelled_prompt_makes_room_for_the_next(bench):
    sequence = bench.prefill(random_tokens(6 * BLOCK), None)
    sequence.cancelled = True
    with pytest.raises(PrefillAborted):
        bench.engine.settled(sequence)
    bench.wait(lambda: sequence.is_settled)
    bench.settle(bench.prefill(random_tokens(70), None))


def test_a_stage_computes_while_the_next_one_does_and_no_more_than_a_few_chunks_ahead(bench):
    os.kill(bench.engine.pids[1], signal.SIGSTOP)
    try:
        sequence, tokens = bench.engine.new_sequence(6 * BLOCK), random_tokens(6 * BLOCK)
        for chunk in range(3):
            bench.wait(lambda: bench.engine.takes_more)
            bench.engine.prefill(sequence, tokens[chunk * BLOCK : (chunk + 1) * BLOCK], None)
        bench.wait(lambda: sequence.done == [3, 0])
        assert not bench.engine.takes_more
    finally:
        os.kill(bench.engine.pids[1], signal.SIGCONT)
    bench.settle(bench.prefill(tokens, None, sequence=sequence))
    assert sequence.done == [5, 5]


def test_pages_that_are_another_agents_by_now_fail_the_request_alone(bench, tmp_path):
    layout, tokens = bench.engine.layout, random_tokens(BLOCK)
    pages = job_pages(layout, len(tokens))
    arena = file_arena(tmp_path, layout, pages)
    assert arena.place is not None
    path = Path(arena.place.path)
    path.unlink()
    (tmp_path / "filler").write_bytes(b"")  # takes the inode, should it be given again at once
    path.write_bytes(bytes(arena.data.size))
    sequence = bench.prefill(tokens, JobKV(layout, arena, pages))
    with pytest.raises(TransferError, match="pages_invalid"):
        bench.settle(sequence)
    assert not path.read_bytes().strip(b"\0")
    bench.settle(bench.prefill(tokens, None))


def test_a_stage_that_dies_ends_the_engine_with_a_reason(model_dir):
    engine = StagedEngine.load_directory(model_dir("llama"), stages=2, block_size=BLOCK)
    bench = Bench(engine)
    sequence = bench.prefill(random_tokens(70), None)
    os.kill(engine.pids[1], signal.SIGTERM)  # is for the engine to hear
    bench.settle(sequence)
    os.kill(engine.pids[1], signal.SIGKILL)
    with pytest.raises(StageDied, match=r"stage [01] "):
        bench.wait(lambda: engine.takes_more and False)
    with pytest.raises(StageDied, match=r"stage [01] "):
        engine.settled(sequence)
    engine.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in engine.pids)


def test_a_stage_that_is_stopped_holds_no_page_and_no_connection_for_long(model_dir, tmp_path):
    engine = StagedEngine.load_directory(model_dir("llama"), stages=2, block_size=BLOCK)
    agent, ours = socket.socketpair()
    with agent:
        with ours:
            engine.hold(ours.fileno())
        agent.setblocking(False)
        with pytest.raises(BlockingIOError):  # the stages hold it
            agent.recv(1)
        pages = job_pages(engine.layout, BLOCK)
        kv = JobKV(engine.layout, file_arena(tmp_path, engine.layout, pages), pages)
        Bench(engine).prefill(random_tokens(BLOCK), kv)
        os.kill(engine.pids[0], signal.SIGSTOP)
        kv.revoke()  # returns, wherever the stage was stopped: in the middle of a layer, it is killed
        engine.close()
        assert agent.recv(1) == b""
    assert not any(Path(f"/proc/{pid}").exists() for pid in engine.pids)


def test_more_stages_than_layers_are_refused(model_dir):
    with pytest.raises(ModelError, match="5 stages for a model of 4 layers"):
        StagedEngine.load_directory(model_dir("llama"), stages=5)

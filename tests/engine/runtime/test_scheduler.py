"""Rounds of the scheduler on an emulated engine, in virtual time."""

import itertools

import pytest

from engine.agent.job_pages import JobKV
from engine.byte_tokenizer import byte_text
from engine.emulated.emulated import EmulatedEngine, emulated_tokens
from engine.errors import EngineError, PrefillAborted
from engine.runtime.sampling import SamplingParams
from engine.runtime.scheduler import Finished, Keep, NewToken, Prefilled, SequenceKept, WorkFailed
from tests.engine.builders import arena_for, job_pages, random_tokens
from tests.engine.runtime.scheduling import PER_TOKEN_S, STEP_S, Bench


class InStages(EmulatedEngine):
    """Takes two chunks at a time, and is through with one when it is told so."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.under_way = []
        self.handed_over = []
        self.died = None

    def prefill(self, sequence, tokens, kv):
        super().prefill(sequence, tokens, kv)
        self.under_way.append(sequence)
        self.handed_over.append(sequence)

    @property
    def takes_more(self):
        if self.died:
            raise self.died
        return len(self.under_way) < 2

    def settled(self, sequence):
        if sequence.cancelled:
            raise PrefillAborted
        return sequence not in self.under_way


def test_every_request_gets_its_own_tokens():
    bench = Bench()
    works = [bench.add(f"r{n}", n, 10) for n in (1, 2, 64, 129, 500)]
    bench.run()
    for work in works:
        assert bench.tokens(work.id) == emulated_tokens(work.prompt, 10)
        assert isinstance(bench.log[-1][1], Finished)
        assert bench.of(work.id, NewToken)[-1].finish_reason == "length"


def test_at_most_one_chunk_between_two_tokens_of_a_stream():
    bench = Bench()
    bench.add("stream", 2, 50)
    bench.run(3)
    for n in range(3):
        bench.add(f"long{n}", 1000)
    bench.run()
    times = [event.at_s for event in bench.of("stream", NewToken)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    # One chunk, and one step of all streams.
    assert max(gaps) <= 128 * PER_TOKEN_S + STEP_S + 1e-9


def test_short_prompts_pass_long_ones_that_still_end():
    bench = Bench()
    bench.add("long", 2000, 1)
    bench.run(1)
    bench.add("short", 100, 1)
    bench.run()
    assert bench.of("short", Prefilled)[0].ended_s < bench.of("long", Prefilled)[0].ended_s


def test_a_flood_of_short_prompts_does_not_starve_a_long_one():
    bench = Bench()
    bench.add("long", 1281, 1)  # ten chunks
    for n in range(200):
        bench.add(f"s{n}", 129, 1)
        bench.run(1)
    assert bench.of("long", Prefilled)


def test_prefill_leg_never_samples():
    bench = Bench()
    bench.add("leg", 300, max_tokens=None)
    bench.run()
    assert [type(event) for _, event in bench.log] == [Prefilled, Finished]
    assert bench.log[0][1].num_tokens == 299


def test_chunks_end_where_states_are_stored():
    bench, stops = Bench(), []
    pages = job_pages(bench.engine.layout, 299, lengths=[192, 256])
    kv = JobKV(
        bench.engine.layout, arena_for(bench.engine.layout, pages), pages, on_layer=lambda *done: stops.append(done[-1])
    )
    work = bench.add("leg", 300, max_tokens=None)
    work.kv = kv
    bench.run()
    assert stops == [128, 192, 256, 299]


def test_abort_while_waiting_prefilling_and_decoding():
    bench = Bench(max_running=2)
    running, prefilling, waiting = bench.add("a", 10, 1000), bench.add("b", 2000), bench.add("c", 10)
    bench.run(3)
    for work in (running, prefilling, waiting):
        assert not bench.scheduler.idle
        work.abort()
        bench.run(1)
    assert bench.scheduler.idle
    assert not any(bench.of(name, Finished) or bench.of(name, WorkFailed) for name in "abc")


def test_abort_takes_effect_inside_a_chunk():
    bench = Bench(chunk_tokens=4096)
    work = bench.add("a", 4000)
    bench.while_computing = work.abort
    bench.run()
    assert bench.now < 2.0  # one of four layers, not the four seconds of the whole chunk
    assert bench.log == []


def test_failure_of_one_request_is_its_own():
    bench = Bench()
    bad, good = bench.add("bad", 100), bench.add("good", 100)
    bad.prompt = [*bad.prompt[:-2], -5, 7]  # no unsigned token
    bench.run()
    assert "OverflowError" in str(bench.of("bad", WorkFailed)[0].error)
    assert bench.tokens("good") == emulated_tokens(good.prompt, 4)


def test_streams_share_a_step():
    bench = Bench()
    for name in "abcd":
        bench.add(name, 2, 20)
    bench.run()
    for name in "abcd":
        times = [event.at_s for event in bench.of(name, NewToken)]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert max(gaps) <= PER_TOKEN_S + STEP_S + 1e-9  # at most the one-token prompt of another, and one step of all


def test_who_is_aborted_in_a_step_gets_no_token_and_costs_nobody_theirs():
    bench = Bench()
    victim, other = bench.add("victim", 2, 50), bench.add("other", 2, 10)
    bench.run(3)
    had = len(bench.of("victim", NewToken))
    bench.while_computing = victim.abort
    bench.run()
    assert len(bench.of("victim", NewToken)) == had
    assert bench.tokens("other") == emulated_tokens(other.prompt, 10)


def test_a_step_that_fails_fails_those_who_made_it():
    bench = Bench()
    for name in "ab":
        bench.add(name, 2, 50)
    bench.run(3)
    late = bench.add("late", 300, 4)

    def broken(sequences, tokens):
        del bench.engine.decode  # the next one works
        raise RuntimeError("no memory")

    bench.engine.decode = broken
    bench.run()
    for name in "ab":
        assert "RuntimeError: no memory" in str(bench.of(name, WorkFailed)[0].error)
    assert bench.tokens("late") == emulated_tokens(late.prompt, 4)


def test_an_error_in_one_answer_is_its_own():
    bench = Bench()
    bad, good = bench.add("bad", 2, 10), bench.add("good", 2, 10)
    bench.run(3)
    bad.output.text.push = None
    bench.run()
    assert "TypeError" in str(bench.of("bad", WorkFailed)[0].error)
    assert bench.tokens("good") == emulated_tokens(good.prompt, 10)


def test_the_context_ends_an_answer():
    bench = Bench()
    bench.add("a", 4090, 1000)
    bench.run()
    assert len(bench.tokens("a")) == 6
    assert bench.of("a", NewToken)[-1].finish_reason == "length"


def test_stop_tokens_and_stop_strings():
    expected = emulated_tokens(random_tokens(20), 12)
    bench = Bench()
    bench.add("token", 20, 12, stop_token_ids=(expected[4],))
    bench.run()
    assert bench.tokens("token") == expected[: expected.index(expected[4]) + 1]
    assert bench.of("token", NewToken)[-1].finish_reason == "stop"
    text = byte_text().decode(expected)
    marker = text[len(text) // 2 : len(text) // 2 + 3]
    bench.add("text", 20, 12, stop=(marker,))
    bench.run()
    assert "".join(event.text for event in bench.of("text", NewToken)) == text[: text.index(marker)]
    assert bench.of("text", NewToken)[-1].finish_reason == "stop"


def test_load_counts_what_is_left():
    bench = Bench(max_running=1)
    bench.add("a", 1001)
    bench.add("b", 101)
    bench.scheduler.step()
    load = bench.scheduler.load
    assert (load.running, load.waiting, load.queued_tokens) == (1, 1, 1000 - 128 + 100)


class Pieces:
    """Stands for a finished sequence: notes when each piece of it goes."""

    def __init__(self, bench, count):
        self.bench, self.count, self.at = bench, count, []

    def keep(self, sequence, kv):
        for _ in range(self.count):
            self.at.append(self.bench.now)
            yield


def test_a_finished_answer_goes_piece_by_piece_between_the_tokens_of_others():
    bench = Bench()
    bench.add("stream", 2, 50)
    bench.run(3)
    pieces, ends = Pieces(bench, 20), []
    bench.engine.keep = pieces.keep
    for _ in range(2):
        bench.scheduler.add(Keep(sequence=None, kv=None, emit=ends.append))
    bench.run()
    assert len(set(pieces.at[:40])) >= 38  # one per round, until the stream had ended
    assert ends == [SequenceKept(), SequenceKept()]
    gaps = [later.at_s - earlier.at_s for earlier, later in itertools.pairwise(bench.of("stream", NewToken))]
    assert max(gaps) <= STEP_S + 1e-9


def test_an_aborted_keep_and_one_that_fails_make_way():
    bench = Bench()
    events = {name: [] for name in ("aborted", "broken", "fine")}
    bench.engine.keep = lambda sequence, kv: Pieces(bench, 3).keep(sequence, kv) if sequence else iter([1 / 0])
    keeps = {name: Keep(sequence=name != "broken", kv=None, emit=happened.append) for name, happened in events.items()}
    for keep in keeps.values():
        bench.scheduler.add(keep)
    keeps["aborted"].abort()
    bench.run()
    assert events["aborted"] == []
    assert isinstance(events["broken"][0], WorkFailed)
    assert events["fine"] == [SequenceKept()]


def test_in_stages_a_prompt_follows_the_one_before_without_a_gap():
    bench = Bench(engine=InStages)
    first, second = bench.add("first", 300, max_tokens=None), bench.add("second", 301, max_tokens=None)
    bench.run()
    assert bench.scheduler.idle  # two chunks are at the stages: nothing to do until they have made progress
    assert len(bench.engine.under_way) == 2
    while bench.engine.under_way:
        bench.engine.under_way.pop(0)
        bench.scheduler.step()
        bench.run()
        ended = len(bench.of("first", Prefilled)) + len(bench.of("second", Prefilled))
        assert len(bench.engine.under_way) == 2 or len(bench.engine.handed_over) == 6, ended
    assert [len(bench.of(name, Finished)) for name in ("first", "second")] == [1, 1]
    assert bench.scheduler.load.running == 0
    assert first.sequence is None
    assert second.sequence is None


def test_in_stages_a_prompt_has_ended_when_all_of_it_is_through():
    bench = Bench(engine=InStages)
    bench.add("a", 200, max_tokens=2)
    bench.run()
    assert bench.log == []
    assert bench.scheduler.load.running == 1
    bench.engine.under_way.clear()
    bench.scheduler.step()
    bench.run()
    assert bench.tokens("a") == emulated_tokens(random_tokens(200), 2)


def test_a_prompt_that_is_aborted_while_it_settles_leaves():
    bench = Bench(engine=InStages)
    bench.add("a", 200, max_tokens=None).abort()
    settling = bench.add("b", 200, max_tokens=None)
    bench.run()
    settling.abort()
    bench.scheduler.step()
    assert bench.log == []
    assert bench.scheduler.load.running == 0


def test_an_engine_that_can_compute_nothing_more_ends_its_scheduler():
    bench = Bench(engine=InStages)
    bench.add("a", 1000, max_tokens=None)
    bench.run()
    bench.engine.died = EngineError("stage 1 was ended by signal 9")
    with pytest.raises(EngineError, match="stage 1"):
        bench.scheduler.step()


def test_an_engine_that_dies_with_nothing_to_prefill_ends_its_scheduler_as_well():
    bench = Bench(engine=InStages)
    bench.engine.died = EngineError("stage 1 was ended by signal 9")
    with pytest.raises(EngineError, match="stage 1"):
        bench.scheduler.step()  # what the engine's news wake it up for


@pytest.mark.parametrize("chunk_tokens", [1, 16, 63])
def test_chunks_below_a_block_fail_the_prompts_that_need_a_second_one(chunk_tokens):
    bench = Bench(chunk_tokens=chunk_tokens)
    bench.add("short", chunk_tokens + 1)
    bench.add("long", 200)
    bench.run(rounds=100)
    assert bench.scheduler.idle
    assert len(bench.tokens("short")) == 4
    (failed,) = bench.of("long", WorkFailed)
    assert f"chunk_tokens = {chunk_tokens}: less than a block, block_size = 64" in str(failed.error)


@pytest.mark.parametrize("chunk_tokens", [64, 65, 96, 127, 200])
def test_chunks_of_a_block_or_more_always_end(chunk_tokens):
    bench = Bench(chunk_tokens=chunk_tokens)
    for length in (1, 64, 65, 500):
        bench.add(str(length), length)
    bench.run(rounds=100)
    assert [len(bench.tokens(name)) for name in ("1", "64", "65", "500")] == [4] * 4


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 0.8])
def test_logits_that_are_no_numbers_fail_their_request_alone(temperature):
    class BadEngine(EmulatedEngine):
        def decode(self, sequences, tokens):
            every = [logits.copy() for logits in super().decode(sequences, tokens)]
            for sequence, logits in zip(sequences, every, strict=True):
                if sequence is sick.sequence and sequence.num_tokens == 71 + 2:
                    logits[5] = float("nan")
            return every

    bench = Bench(engine=BadEngine)
    whole, sick = bench.add("whole", 70, 6), bench.add("sick", 71, 6)
    sick.params = SamplingParams(max_tokens=6, temperature=temperature)
    bench.run()
    (failed,) = bench.of("sick", WorkFailed)
    assert "no token can be chosen" in str(failed.error)
    assert len(bench.tokens("sick")) == 2
    assert bench.tokens("whole") == emulated_tokens(whole.prompt, 6)
    assert bench.scheduler.idle

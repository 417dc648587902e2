"""A stand-in in virtual time: what takes how long, and that its answers are those of every emulated engine."""

import asyncio
import itertools
import math

import pytest

from engine.agent.job_pages import JobKV
from engine.byte_tokenizer import byte_text
from engine.emulated.emulated import EmulatedEngine, emulated_tokens
from engine.emulated.paced import PacedModel, PacedScheduler
from engine.errors import EngineError
from engine.runtime.sampling import SamplingParams
from engine.runtime.scheduler import Finished, ModelWork, NewToken, Prefilled, WorkFailed
from engine.runtime.turns import WorkShare
from tests.engine.builders import arena_for, job_pages, random_tokens
from tests.engine.standins import stand_in


def no_sleep(seconds):
    raise AssertionError("a stand-in holds no thread")


class Bench:
    """A paced scheduler under a clock that jumps to when something is due."""

    def __init__(self, chunk_tokens=128, stages=1, **changes):
        self.now, self.log = 0.0, []
        standing = stand_in(**changes)
        self.prefill_s = standing.prefill_s
        self.engine = EmulatedEngine(standing.layout(64), no_sleep, max_model_len=4096)
        self.scheduler = PacedScheduler(
            self.engine, byte_text(), lambda: self.now, standing, chunk_tokens=chunk_tokens, stages=stages
        )

    def add(self, name, length, max_tokens=4, **fields):
        params = None if max_tokens is None else SamplingParams(max_tokens=max_tokens, temperature=0.0)
        work = ModelWork(
            id=name, prompt=random_tokens(length), params=params,
            emit=lambda event: self.log.append((name, event)), **fields,
        )  # fmt: skip
        self.scheduler.add(work)
        self.scheduler.step()
        return work

    def run(self, until=math.inf):
        for _ in range(100_000):
            due_at = self.scheduler.due_at
            if due_at > until or due_at == math.inf:
                self.now = max(self.now, min(until, due_at)) if until < math.inf else self.now
                return
            self.now = max(self.now, due_at)
            self.scheduler.step()
        raise AssertionError("it never ends")

    def of(self, name, kind):
        return [event for who, event in self.log if who == name and isinstance(event, kind)]

    def landed(self, name, length, **options):
        """A request whose KVCache is there already."""
        pages = job_pages(self.engine.layout, length - 1)
        kv = JobKV(self.engine.layout, arena_for(self.engine.layout, pages), pages)
        self.engine.prefill(self.engine.new_sequence(), random_tokens(length)[:-1], kv)
        return self.add(name, length, kv=kv, load_tokens=length - 1, **options)


def test_a_prompt_takes_the_time_of_its_curve_however_it_is_cut():
    for chunk_tokens in (64, 128, 4096):
        bench = Bench(chunk_tokens)
        bench.add("a", 1001, None)
        bench.run()
        assert bench.of("a", Prefilled)[0].ended_s == pytest.approx(1.5)
        assert isinstance(bench.log[-1][1], Finished)


def test_it_reports_the_steps_that_it_keeps_to():
    bench = Bench()
    bench.landed("a", 100)
    bench.run()
    ((batch, seconds),) = bench.scheduler.steps.report()
    tokens = bench.of("a", NewToken)
    assert (batch, seconds) == (1.0, pytest.approx(tokens[1].at_s - tokens[0].at_s))


def test_a_cached_prefix_costs_what_the_curve_saves():
    bench = Bench(prefill_points=((0, 0.5), (1000, 1.5), (2000, 4.5)))
    pages = job_pages(bench.engine.layout, 1999, cached_tokens=1024, lengths=[1024])
    kv = JobKV(bench.engine.layout, arena_for(bench.engine.layout, pages), pages)
    bench.engine.prefill(bench.engine.new_sequence(), random_tokens(2000)[:1024], kv)
    bench.add("a", 2000, None, kv=kv, load_tokens=1024)
    bench.run()
    assert bench.of("a", Prefilled)[0].ended_s == pytest.approx(0.5 + (1999 - 1024) * 0.003)


def test_prompts_are_computed_one_by_one_in_the_order_of_arrival():
    bench = Bench()
    for name, length in (("long", 2001), ("short", 101), ("middle", 1001)):
        bench.add(name, length, None)
    bench.run()
    ends = [(name, bench.of(name, Prefilled)[0].ended_s) for name in ("long", "short", "middle")]
    assert ends == [("long", pytest.approx(2.5)), ("short", pytest.approx(3.1)), ("middle", pytest.approx(4.6))]


def test_layers_leave_while_later_chunks_are_computed():
    bench, written = Bench(), []
    pages = job_pages(bench.engine.layout, 512)
    kv = JobKV(
        bench.engine.layout, arena_for(bench.engine.layout, pages), pages,
        on_layer=lambda group, layer, tokens: written.append((bench.now, tokens)),
    )  # fmt: skip
    bench.add("a", 513, None, kv=kv)
    bench.run()
    assert [tokens for _, tokens in written] == [128, 256, 384, 512]
    times = [at for at, _ in written]
    assert times == sorted(times)
    assert times[0] < 0.5 + 0.128 < times[1]


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_stages_share_a_long_prompt_as_the_arithmetic_of_pipelines_says(stages):
    bench = Bench(chunk_tokens=64, stages=stages)
    bench.add("a", 16 * 64 + 1, None)
    bench.run()
    assert bench.of("a", Prefilled)[0].ended_s == pytest.approx(0.5 + (16 + stages - 1) / stages * 0.064)
    assert bench.scheduler.idle


def test_the_next_prompt_follows_as_soon_as_the_first_stage_is_free():
    bench = Bench(chunk_tokens=64, stages=4, prefill_points=((0, 0.0), (1000, 1.0)))
    for name in "abc":
        bench.add(name, 8 * 64 + 1, None)
    bench.run()
    ends = [bench.of(name, Prefilled)[0].ended_s for name in "abc"]
    assert ends == pytest.approx([(8 * count + 3) * 0.016 for count in (1, 2, 3)])


def test_layers_leave_as_their_stage_is_done_with_its_chunk():
    bench, written = Bench(chunk_tokens=64, stages=2, prefill_points=((0, 0.0), (1000, 1.0))), []
    pages = job_pages(bench.engine.layout, 128)
    kv = JobKV(
        bench.engine.layout, arena_for(bench.engine.layout, pages), pages,
        on_layer=lambda group, layer, tokens: written.append((layer, tokens, bench.now)),
        on_state=lambda group, layer, tokens: written.append((layer, tokens, bench.now)),
    )  # fmt: skip
    bench.add("a", 129, None, kv=kv)
    bench.run()
    # One layer of attention, three of states, which are kept at the end alone: two layers a stage, 16 ms each.
    assert written == [
        (0, 64, pytest.approx(0.016)),
        (0, 128, pytest.approx(0.048)),
        (1, 128, pytest.approx(0.064)),
        (2, 128, pytest.approx(0.080)),
        (3, 128, pytest.approx(0.096)),
    ]


@pytest.mark.parametrize("stages", [2, 3])
def test_what_stages_have_written_goes_on_as_every_emulated_engine_does(stages):
    bench = Bench(chunk_tokens=64, stages=stages)
    pages = job_pages(bench.engine.layout, 500)
    kv = JobKV(bench.engine.layout, arena_for(bench.engine.layout, pages), pages)
    bench.add("leg", 501, None, kv=kv)
    bench.add("other", 301, None)
    bench.run()
    other = Bench()
    work = other.add("a", 501, kv=kv, load_tokens=500)
    other.run()
    assert [event.sampled.token for event in other.of("a", NewToken)] == emulated_tokens(work.prompt, 4)


def test_an_aborted_prompt_frees_the_stages_for_the_next():
    bench = Bench(chunk_tokens=64, stages=4, prefill_points=((0, 0.0), (1000, 1.0)))
    gone = bench.add("a", 2001, None)
    bench.run(until=0.1)
    gone.abort()
    bench.add("b", 8 * 64 + 1, None)
    bench.run()
    assert not bench.of("a", Prefilled)
    assert bench.of("b", Prefilled)[0].ended_s == pytest.approx(0.1 + 11 * 0.016)
    assert bench.scheduler.idle


def test_a_batch_makes_its_steps_together_and_slower_the_fuller_it_is():
    bench = Bench()
    for name in "abcd":
        bench.landed(name, 65, max_tokens=10)
    bench.run()
    for name in "abcd":
        times = [event.at_s for event in bench.of(name, NewToken)]
        assert times == pytest.approx([0.04 * count for count in range(1, 11)])


def test_more_than_fit_wait_for_a_place():
    bench = Bench(max_running=1)
    bench.landed("a", 65, max_tokens=4)
    bench.landed("b", 65, max_tokens=4)
    assert (bench.scheduler.load.running, bench.scheduler.load.waiting) == (1, 1)
    bench.run()
    assert bench.of("a", NewToken)[-1].at_s == pytest.approx(0.1)
    assert bench.of("b", NewToken)[0].at_s == pytest.approx(0.125)


def test_a_token_may_stand_for_many_and_the_first_still_comes_after_one_step():
    bench = Bench(steps_per_token=64.0, step_s_per_request=0.0)
    bench.landed("a", 65, max_tokens=3)
    bench.run()
    times = [event.at_s for event in bench.of("a", NewToken)]
    assert times == pytest.approx([0.02, 0.02 + 64 * 0.02, 0.02 + 2 * 64 * 0.02])


def test_the_batch_stands_still_while_a_prompt_is_computed_but_for_the_servers_share():
    bench = Bench(step_s=0.1, step_s_per_request=0.0)
    bench.landed("stream", 65, max_tokens=20)
    bench.add("prompt", 1001, None)
    bench.run()
    times = [event.at_s for event in bench.of("stream", NewToken)]
    gaps = [later - earlier for earlier, later in itertools.pairwise([0.0, *times])]
    assert max(gaps) == pytest.approx(1.0 + 0.1)
    assert times[-1] == pytest.approx(3.0)


def test_a_landing_does_not_wait_behind_a_prompt():
    bench = Bench()
    bench.add("prompt", 2001, None)
    bench.landed("landed", 65, max_tokens=1)
    assert bench.of("landed", Prefilled)
    assert not bench.of("prompt", Prefilled)


def test_answers_are_those_of_every_emulated_engine():
    bench = Bench()
    works = [bench.add(f"p{length}", length, 12) for length in (1, 2, 64, 129, 700)]
    works += [bench.landed(f"l{length}", length, max_tokens=12) for length in (2, 65, 300)]
    bench.run()
    for work in works:
        tokens = [event.sampled.token for event in bench.of(work.id, NewToken)]
        assert tokens == emulated_tokens(work.prompt, 12)


def test_being_called_late_moves_nothing():
    bench = Bench()
    for name in "ab":
        bench.add(name, 1001, None)
    while bench.scheduler.due_at < math.inf:
        bench.now = bench.scheduler.due_at + 0.003
        bench.scheduler.step()
    assert bench.of("b", Prefilled)[0].ended_s == pytest.approx(3.0, abs=0.004)


def test_what_is_aborted_makes_way():
    bench = Bench(max_running=2)
    prompt, stream, waiting = bench.add("p", 2001, None), bench.landed("s", 65, max_tokens=500), bench.add("w", 101, 1)
    bench.run(until=1.0)
    prompt.abort()
    stream.abort()
    bench.run()
    assert not bench.of("p", Prefilled)
    assert len(bench.of(waiting.id, NewToken)) == 1
    assert bench.now < 3.0
    assert bench.scheduler.idle


def test_a_failure_is_its_own():
    bench = Bench()
    bad, good = bench.add("bad", 300, None), bench.add("good", 300, 4)
    bad.prompt = [*bad.prompt[:-2], -5, 7]  # no unsigned token
    bench.run()
    assert "OverflowError" in str(bench.of("bad", WorkFailed)[0].error)
    assert len(bench.of(good.id, NewToken)) == 4


def test_on_an_event_loop_it_answers_and_ends_with_a_word_to_those_who_wait():
    async def scenario():
        loop = asyncio.get_running_loop()
        standing = stand_in(prefill_points=((0, 0.0), (1000, 0.01)), step_s=0.0005, step_s_per_request=0.0)
        engine = EmulatedEngine(standing.layout(64), no_sleep, max_model_len=4096)
        scheduler = PacedScheduler(engine, byte_text(), loop.time, standing, chunk_tokens=128)
        loads = []
        model = PacedModel(scheduler, loop.time, on_load=lambda: loads.append(model.load))
        model.start()
        events = {name: asyncio.Queue() for name in ("answered", "cut off")}
        prompt = random_tokens(200)
        for name, max_tokens in (("answered", 20), ("cut off", 3000)):
            params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
            model.submit(ModelWork(id=name, prompt=prompt, params=params, emit=events[name].put_nowait))
        tokens = []
        async with asyncio.timeout(60):
            while not isinstance(event := await events["answered"].get(), Finished):
                tokens += [event.sampled.token] if isinstance(event, NewToken) else []
        assert tokens == emulated_tokens(prompt, 20)
        assert loads
        model.stop(0.0)
        while not events["cut off"].empty():
            last = events["cut off"].get_nowait()
        assert isinstance(last, WorkFailed)
        assert isinstance(last.error, EngineError)
        assert not model.alive

    asyncio.run(scenario())


@pytest.mark.parametrize("stages", [1, 2])
def test_chunks_below_a_block_fail_that_prompt_alone(stages):
    bench = Bench(chunk_tokens=16, stages=stages)
    bench.add("long", 200)
    bench.add("short", 16)
    bench.run()
    (failed,) = bench.of("long", WorkFailed)
    assert "chunk_tokens = 16: less than a block, block_size = 64" in str(failed.error)
    assert len(bench.of("short", NewToken)) == 4
    assert bench.scheduler.idle


def test_a_light_tenants_prompt_comes_before_the_next_chunk_of_a_heavy_ones():
    bench = Bench(chunk_tokens=128)
    for n in range(5):
        bench.add(f"h{n}", 1001, None, part=WorkShare("heavy"))
    bench.run(until=0.6)
    bench.add("light", 129, None, part=WorkShare("light"))
    bench.run()
    alone = Bench(chunk_tokens=128)
    alone.add("light", 129, None)
    alone.run()
    chunk_s = bench.prefill_s(128) - bench.prefill_s(0)
    waited_s = bench.of("light", Prefilled)[0].ended_s - 0.6
    assert waited_s <= alone.of("light", Prefilled)[0].ended_s + chunk_s + 1e-9


def test_a_prompt_that_was_set_aside_ends_and_costs_no_more():
    bench = Bench(chunk_tokens=128)
    bench.add("heavy", 1001, None, part=WorkShare("heavy"))
    bench.run(until=0.6)
    bench.add("light", 129, None, part=WorkShare("light"))
    bench.run()
    ends = [bench.of(name, Prefilled)[0].ended_s for name in ("light", "heavy")]
    assert ends[0] < ends[1] == pytest.approx(bench.prefill_s(1000) + bench.prefill_s(128))


def test_prompts_of_one_tenant_are_computed_one_after_the_other():
    bench = Bench(chunk_tokens=128)
    for n in range(3):
        bench.add(f"p{n}", 1001, None, part=WorkShare("one"))
    bench.run()
    ends = [bench.of(f"p{n}", Prefilled)[0].ended_s for n in range(3)]
    assert ends == pytest.approx([bench.prefill_s(1000) * n for n in (1, 2, 3)])


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_tenants_beside_each_other_have_their_own_tokens(stages):
    bench = Bench(chunk_tokens=128, stages=stages)
    works = [bench.add(f"{t}{n}", 300 + 100 * n, 5, part=WorkShare(t)) for n in range(4) for t in "abc"]
    bench.run()
    for work in works:
        assert [event.sampled.token for event in bench.of(work.id, NewToken)] == emulated_tokens(work.prompt, 5)

"""A scheduler on an emulated engine, in virtual time."""

from engine.agent.job_pages import JobKV
from engine.byte_tokenizer import byte_text
from engine.emulated.emulated import EmulatedEngine, EmulatedTimes, emulated_layout
from engine.runtime.sampling import SamplingParams
from engine.runtime.scheduler import ModelWork, NewToken, Scheduler
from engine.runtime.turns import WorkShare
from tests.engine.builders import arena_for, job_pages, random_tokens

PER_TOKEN_S, STEP_S = 0.001, 0.01


class Bench:
    """A scheduler whose engine's sleeping moves the clock."""

    def __init__(self, chunk_tokens=128, engine=EmulatedEngine, **options):
        self.now = 0.0
        self.log = []
        self.while_computing = lambda: None
        times = EmulatedTimes(prefill_per_token_s=PER_TOKEN_S, decode_step_s=STEP_S)
        self.engine = engine(emulated_layout("kimi_linear", 64), self.sleep, times, max_model_len=4096)
        self.scheduler = Scheduler(self.engine, byte_text(), lambda: self.now, chunk_tokens=chunk_tokens, **options)

    def sleep(self, seconds):
        self.now += seconds
        self.while_computing()

    def add(self, name, length, max_tokens=4, tenant="", weight=1.0, **params):
        sampling = None if max_tokens is None else SamplingParams(max_tokens=max_tokens, temperature=0.0, **params)
        work = ModelWork(
            id=name, prompt=random_tokens(length), params=sampling, part=WorkShare(tenant, weight),
            emit=lambda event: self.log.append((name, event)),
        )  # fmt: skip
        self.scheduler.add(work)
        return work

    def run(self, rounds=10_000):
        for _ in range(rounds):
            if self.scheduler.idle:
                return
            self.scheduler.step()

    def of(self, name, kind):
        return [event for who, event in self.log if who == name and isinstance(event, kind)]

    def tokens(self, name):
        return [event.sampled.token for event in self.of(name, NewToken)]


def landed(bench, name, length, tenant):
    """A request whose KVCache is there already."""
    pages = job_pages(bench.engine.layout, length - 1)
    kv = JobKV(bench.engine.layout, arena_for(bench.engine.layout, pages), pages)
    bench.engine.prefill(bench.engine.new_sequence(), random_tokens(length)[:-1], kv)
    work = bench.add(name, length, 4, tenant=tenant)
    work.kv, work.load_tokens = kv, length - 1

"""Random transactions against a model that recomputes everything from what was committed."""

from collections.abc import Iterator

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hybrid_cache.cache.prefix_cache import PrefixCache
from hybrid_cache.cache.reservation import Purpose, Reservation
from hybrid_cache.errors import OutOfPages
from hybrid_cache.eviction import POLICIES, default_policy
from hybrid_cache.index.index import PrefixIndex
from tests.hybrid_cache.builders import BLOCK, FULL, STATE, WINDOW, hashes_of, make_layout, reserve
from tests.properties import examples

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(lambda runs: [t for t in runs for _ in range(6)])


def own_pages(reservation: Reservation, block_size: int) -> set[int]:
    first = reservation.cached_tokens // block_size
    pages = {p for group in reservation.blocks for block in group[first:] for p in block}
    return pages | {
        p
        for group in reservation.states
        for length, block in group.items()
        for p in block
        if length != reservation.cached_tokens
    }


class CacheMachine(RuleBasedStateMachine):
    """Requests of two gateways over a pool too small for them; the arena maps a page to what was written there."""

    specs = (FULL, STATE)
    make_policy = staticmethod(default_policy)

    def __init__(self) -> None:
        super().__init__()
        layout = make_layout(*self.specs)
        self.cache = PrefixCache(layout, 45, eviction=self.make_policy(layout))
        self.index = PrefixIndex(layout)
        self.open: dict[str, tuple[Reservation, list[int]]] = {}
        self.arena: dict[int, object] = {}
        self.now = 0.0
        self.made = 0
        self.check: Iterator[None] | None = None
        self.pinning: tuple[str, list[int], Purpose, Iterator[None]] | None = None
        self.ending: list[Iterator[None]] = []

    @rule(step=st.integers(1, 4))
    def begin_check(self, step):
        if self.check is None:
            self.check = self.cache.integrity_steps(step)

    @precondition(lambda self: self.check)
    @rule(steps=st.integers(1, 12))
    def go_on_checking(self, steps):
        for _ in range(steps):
            if next(self.check, self) is self:
                self.check = None
                return

    @rule(tokens=TOKENS, purpose=st.sampled_from(Purpose))
    def begin(self, tokens, purpose):
        name = f"r{self.made}"
        self.made += 1
        before = self.cache.report()
        try:
            reservation = reserve(self.cache, name, tokens, purpose=purpose, now=self.now)
        except OutOfPages:
            assert self.cache.report() == before
            return
        self.check_shared(reservation, tokens)
        self.open[name] = (reservation, tokens)
        self.write(reservation, tokens)

    def write(self, reservation, tokens):
        """Fills own pages with what they are for; a page written under another's feet shows in `check_shared`."""
        first = reservation.cached_tokens // BLOCK
        for group, blocks in enumerate(reservation.blocks):
            for index, pages in enumerate(blocks):
                shared = any(self.arena.get(p) == ("block", group, tuple(tokens[: (index + 1) * BLOCK])) for p in pages)
                if index >= first or (reservation.purpose is not Purpose.PREFILL and not shared):
                    self.arena.update(dict.fromkeys(pages, ("block", group, tuple(tokens[: (index + 1) * BLOCK]))))
        for group, states in enumerate(reservation.states):
            for length, pages in states.items():
                if length > reservation.cached_tokens or reservation.purpose is not Purpose.PREFILL:
                    self.arena.update(dict.fromkeys(pages, ("state", group, tuple(tokens[:length]))))

    def check_shared(self, reservation, tokens):
        """What a prefill loads is what was written for exactly these tokens."""
        cached = reservation.cached_tokens
        for group in self.cache.layout.full_groups:
            for index, pages in enumerate(reservation.blocks[group][: cached // BLOCK]):
                for page in pages:
                    assert self.arena[page] == ("block", group, tuple(tokens[: (index + 1) * BLOCK]))
        if reservation.purpose is not Purpose.PREFILL or not cached:
            return
        for group in self.cache.layout.state_groups:
            for page in reservation.states[group][cached]:
                assert self.arena[page] == ("state", group, tuple(tokens[:cached]))
        for group in self.cache.layout.window_groups:
            for index in self.cache.layout.window_blocks(group, cached):
                for page in reservation.blocks[group][index]:
                    assert self.arena[page] == ("block", group, tuple(tokens[: (index + 1) * BLOCK]))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), share=st.integers(0, 4))
    def commit(self, data, share):
        name = data.draw(st.sampled_from(sorted(self.open)))
        _, tokens = self.open[name]
        self.cache.commit(name, len(tokens) * share // 4, self.now)
        if share == 4 and self.cache.layout.full_groups:
            assert self.cache.match(hashes_of(tokens), len(tokens)).attention_tokens == len(tokens) // BLOCK * BLOCK

    @precondition(lambda self: self.open)
    @rule(data=st.data(), end=st.sampled_from(["release", "abort"]))
    def end(self, data, end):
        name = data.draw(st.sampled_from(sorted(self.open)))
        del self.open[name]
        getattr(self.cache, end)(name, self.now)

    @rule(tokens=TOKENS, purpose=st.sampled_from([Purpose.PREFILL, Purpose.LANDING]), step=st.integers(1, 3))
    def lock_ahead(self, tokens, purpose, step):
        if self.pinning is None:
            steps = self.cache.pin_steps("pin", hashes_of(tokens), len(tokens), purpose, step)
            self.pinning = ("pin", tokens, purpose, steps)
            next(steps, None)

    @precondition(lambda self: self.pinning)
    @rule(end=st.sampled_from(["go on", "go on", "take over", "give up"]))
    def go_on_locking(self, end):
        pinned, tokens, purpose, steps = self.pinning
        if end == "go on":
            next(steps, None)
            return
        self.pinning = None
        if end == "take over":
            name = f"r{self.made}"
            self.made += 1
            try:
                reservation = self.cache.reserve(
                    name, hashes_of(tokens), len(tokens), now=self.now, purpose=purpose, pinned=pinned
                )
            except OutOfPages:
                pass
            else:
                self.check_shared(reservation, tokens)
                self.open[name] = (reservation, tokens)
                self.write(reservation, tokens)
        self.cache.release(pinned, self.now)
        assert next(steps, None) is None

    @precondition(lambda self: self.open)
    @rule(data=st.data(), step=st.integers(1, 3))
    def end_in_steps(self, data, step):
        name = data.draw(st.sampled_from(sorted(self.open)))
        del self.open[name]
        steps = self.cache.release_steps(name, self.now, step)
        if next(steps, self) is None:
            self.ending.append(steps)

    @precondition(lambda self: self.ending)
    @rule(data=st.data())
    def go_on_ending(self, data):
        steps = data.draw(st.sampled_from(self.ending))
        if next(steps, self) is self:
            self.ending.remove(steps)

    @rule(seconds=st.floats(0.0, 8.0))
    def wait(self, seconds):
        self.now += seconds

    @rule(tokens=TOKENS, keep=st.integers(0, 24), unused_s=st.sampled_from([0.0, 5.0]))
    def drop(self, tokens, keep, unused_s):
        hashes, before = hashes_of(tokens), self.cache.report()
        kept = self.cache.match(hashes[: keep // BLOCK], min(keep, len(tokens))).attention_tokens
        freed = self.cache.drop(hashes, keep, unused_since=self.now - unused_s, now=self.now)
        after = self.cache.report()
        assert (after.pages_free - before.pages_free, after.pages_locked) == (freed, before.pages_locked)
        assert self.cache.match(hashes, len(tokens)).attention_tokens >= kept

    @rule()
    def clear(self):
        self.cache.shrink(self.cache.evictable_pages, self.now)

    @invariant()
    def books_balance(self):
        if self.check is None:
            self.cache.check_integrity()
        held = [own_pages(reservation, BLOCK) for reservation, _ in self.open.values()]
        assert sum(map(len, held)) == len(set().union(*held))

    @invariant()
    def index_follows(self):
        for event in self.cache.take_events():
            self.index.apply("n", event)
        hashes = hashes_of([0] * 24)
        assert self.index.match("n", hashes, 24) == self.cache.match(hashes, 24)

    def teardown(self):
        self.cache.release("pin", self.now)
        for steps in self.ending:
            for _ in steps:
                pass
        for name in list(self.open):
            self.cache.release(name, self.now)
        self.cache.shrink(self.cache.evictable_pages, self.now)
        assert self.cache.report().pages_free == 45


class WindowMachine(CacheMachine):
    specs = (FULL, WINDOW, STATE)


class LruMachine(CacheMachine):
    specs = (FULL,)
    make_policy = staticmethod(lambda layout: POLICIES["lru"](45))


class WorkloadMachine(CacheMachine):
    specs = (FULL, WINDOW, STATE)
    make_policy = staticmethod(lambda layout: POLICIES["wa"](45))


class DensityMachine(CacheMachine):
    specs = (FULL, WINDOW)


class NoFullAttentionMachine(CacheMachine):
    specs = (WINDOW, STATE)


LIMITS = settings(max_examples=examples(25), stateful_step_count=25, deadline=None)
TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = LIMITS
TestWindowMachine = WindowMachine.TestCase
TestWindowMachine.settings = LIMITS
TestNoFullAttentionMachine = NoFullAttentionMachine.TestCase
TestNoFullAttentionMachine.settings = LIMITS
TestLruMachine = LruMachine.TestCase
TestLruMachine.settings = LIMITS
TestWorkloadMachine = WorkloadMachine.TestCase
TestWorkloadMachine.settings = LIMITS
TestDensityMachine = DensityMachine.TestCase
TestDensityMachine.settings = LIMITS

from hybrid_cache.cache.lookup import PrefixHit
from hybrid_cache.cache.prefix_cache import PrefixCache
from hybrid_cache.tiers.disk import BlockKey, DiskTier
from hybrid_cache.tiers.files import FileDisk
from hybrid_cache.tiers.tiers import Tiers
from tests.hybrid_cache.builders import BLOCK, FULL, STATE, WINDOW, hashes_of, make_layout, reserve

LAYOUT = make_layout(FULL, WINDOW, STATE)
PAGES = 120


class Node:
    """A cache with an arena and a disk; prefill writes what a page is for."""

    def __init__(self, directory):
        self.arena = bytearray(PAGES * LAYOUT.page_bytes)
        self.cache = PrefixCache(LAYOUT, PAGES)
        self.disk = DiskTier(LAYOUT, FileDisk(directory), capacity_bytes=1 << 20)
        self.tiers = Tiers(self.cache, self.disk, self.views)

    def views(self, segments):
        return [memoryview(self.arena)[s.start : s.start + s.length] for s in segments]

    def prefill(self, tokens, name="p"):
        reservation = reserve(self.cache, name, tokens)
        first = reservation.cached_tokens // BLOCK
        for group, blocks in enumerate(reservation.blocks):
            for index, pages in enumerate(blocks):
                if pages and index >= first:
                    self.fill(group, pages, (group, tuple(tokens[: (index + 1) * BLOCK])))
        for group, states in enumerate(reservation.states):
            for length, pages in states.items():
                if length > reservation.cached_tokens:
                    self.fill(group, pages, (group, tuple(tokens[:length])))
        self.cache.commit(name, len(tokens), 0.0)
        self.cache.release(name, 0.0)

    def fill(self, group, pages, meaning):
        for view in self.views(LAYOUT.segments(group, 0, pages)):
            view[:] = bytes([hash(meaning) % 251]) * view.nbytes

    def byte_of(self, group, pages):
        return {byte for view in self.views(LAYOUT.segments(group, 0, pages)) for byte in bytes(view)}

    def promote(self, tokens):
        plan = self.tiers.plan_promotion("promote", hashes_of(tokens), len(tokens), now=1.0)
        if plan is None:
            return False
        ok = self.tiers.read(plan)
        self.tiers.finish(plan, ok, 1.0)
        self.cache.check_integrity()
        return ok


PROMPT = list(range(18))


def test_evicted_prefix_comes_back(tmp_path):
    node = Node(tmp_path)
    node.prefill(PROMPT)
    node.cache.shrink(node.cache.evictable_pages, 0.0)
    assert node.cache.match(hashes_of(PROMPT), 18) == PrefixHit(0, 0)
    assert node.tiers.match(hashes_of(PROMPT), 18) == PrefixHit(16, 16)
    node.arena[:] = bytes(len(node.arena))
    assert node.promote(PROMPT)
    again = reserve(node.cache, "again", PROMPT)
    assert again.cached_tokens == 16
    assert node.byte_of(0, again.blocks[0][2]) == {hash((0, tuple(PROMPT[:12]))) % 251}
    assert node.byte_of(2, again.states[2][16]) == {hash((2, tuple(PROMPT[:16]))) % 251}
    node.disk.close()


def test_restarted_node_serves_its_old_prefixes(tmp_path):
    node = Node(tmp_path)
    node.prefill(PROMPT)
    node.cache.shrink(node.cache.evictable_pages, 0.0)
    node.disk.close()
    node = Node(tmp_path)
    assert node.promote(PROMPT)
    assert node.cache.match(hashes_of(PROMPT), 18) == PrefixHit(16, 16)
    node.disk.close()


def test_damaged_block_ends_the_promotion(tmp_path):
    node = Node(tmp_path)
    node.prefill(PROMPT)
    node.cache.shrink(node.cache.evictable_pages, 0.0)
    node.disk.flush()
    file = next(tmp_path.glob("*-2.kv"))
    data = bytearray(file.read_bytes())
    data[300] ^= 1
    file.write_bytes(data)
    assert not node.promote(PROMPT)
    assert node.cache.match(hashes_of(PROMPT), 18) == PrefixHit(0, 0)
    assert node.disk.report().corrupt == 1
    assert node.cache.report().pages_free == PAGES
    assert not node.promote(PROMPT)  # the disk has no state any more
    node.disk.close()


def test_nothing_to_promote(tmp_path):
    node = Node(tmp_path)
    node.prefill(PROMPT)
    assert not node.promote(PROMPT)
    assert not node.promote([7] * 18)
    node.disk.close()


def test_a_window_that_is_half_in_memory_comes_back_whole(tmp_path):
    node = Node(tmp_path)
    node.prefill(PROMPT)
    tail = [hashes_of(PROMPT)[index] for index in LAYOUT.window_blocks(1, 16)]
    while all(node.cache.pages_of(1, block_hash) for block_hash in tail):
        node.cache.shrink(1, 0.0)
    assert any(node.cache.pages_of(1, block_hash) for block_hash in tail)
    assert node.promote(PROMPT)
    again = reserve(node.cache, "again", PROMPT)
    assert again.cached_tokens == 16
    for index in LAYOUT.window_blocks(1, 16):
        assert node.byte_of(1, again.blocks[1][index]) == {hash((1, tuple(PROMPT[: (index + 1) * BLOCK]))) % 251}
    node.disk.close()


def test_attention_alone_comes_back_for_a_landing(tmp_path):
    node = Node(tmp_path)
    node.prefill(PROMPT)
    node.cache.shrink(node.cache.evictable_pages, 0.0)
    node.disk.flush()
    for group in (1, 2):  # as if they had been overwritten since
        for block_hash in node.disk.hashes(group):
            node.disk.drop(BlockKey(group, block_hash))
    assert not node.promote(PROMPT)
    plan = node.tiers.plan_promotion("p", hashes_of(PROMPT), 18, now=1.0, attention_only=True)
    assert plan is not None
    assert {key.group for key, _ in plan.blocks()} == {0}
    assert plan.size == 4 * LAYOUT.block_bytes(0)
    node.tiers.finish(plan, node.tiers.read(plan), 1.0)
    assert node.cache.match(hashes_of(PROMPT), 18) == PrefixHit(0, 16)
    node.cache.check_integrity()
    node.disk.close()

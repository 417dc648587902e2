import itertools

import numpy as np
import pytest
from msgspec.structs import replace

from engine.agent.job_pages import JobKV, MappedArena
from engine.emulated.emulated import GROUPS, emulated_layout
from engine.errors import PagesInvalid
from hybrid_cache.layout.layout import KVCacheGroup, ModelLayout
from hybrid_cache.layout.spec import FullAttention, LinearState
from tests.engine.builders import arena_for, job_pages


def random_rows(rng, count, row_bytes):
    return rng.integers(0, 256, (count, row_bytes)).astype(np.uint8)


@pytest.mark.parametrize("arch", sorted(GROUPS))
def test_rows_written_in_any_pieces_are_read_back(arch):
    layout, rng = emulated_layout(arch, 64), np.random.default_rng(0)
    pages = job_pages(layout, 300)
    kv = JobKV(layout, arena_for(layout, pages), pages)
    layer = layout.groups[0].layers[-1]
    spec = layout.groups[0].spec
    k = random_rows(rng, 300, spec.k_bytes_per_token)
    v = random_rows(rng, 300, spec.bytes_per_token - spec.k_bytes_per_token)
    cuts = [0, *sorted(rng.choice(np.arange(1, 300), 9, replace=False).tolist()), 300]
    for start, stop in itertools.pairwise(cuts):
        kv.write_attention(layer, start, k[start:stop], v[start:stop])
    for start, stop in ((0, 300), (1, 2), (63, 65), (64, 128), (190, 300)):
        read = kv.read_attention(layer, start, stop)
        assert np.array_equal(read[0], k[start:stop])
        assert np.array_equal(read[1], v[start:stop])


def test_layers_and_groups_do_not_overlap():
    layout = ModelLayout(
        "m", "float32", 4, (KVCacheGroup(FullAttention(24, 8), (0, 2)), KVCacheGroup(LinearState(50), (1, 3)))
    )
    pages = job_pages(layout, 10)
    kv = JobKV(layout, arena_for(layout, pages), pages)
    for layer in (0, 2):
        kv.write_attention(layer, 0, np.full((10, 8), layer + 1, np.uint8), np.full((10, 16), layer + 10, np.uint8))
    for layer in (1, 3):
        kv.write_state(layer, 10, [np.full(20, layer + 1, np.uint8), np.full(30, layer + 10, np.uint8)])
    for layer in (0, 2):
        k, v = kv.read_attention(layer, 0, 10)
        assert (set(k.flat), set(v.flat)) == ({layer + 1}, {layer + 10})
    for layer in (1, 3):
        assert kv.read_state(layer, 10).tolist() == [layer + 1] * 20 + [layer + 10] * 30


def test_writes_are_announced_with_what_they_complete():
    heard = []
    layout = emulated_layout("kimi_linear", 64)
    pages = job_pages(layout, 130, lengths=[128])
    kv = JobKV(
        layout,
        arena_for(layout, pages),
        pages,
        on_layer=lambda *done: heard.append(("kv", *done)),
        on_state=lambda *done: heard.append(("state", *done)),
    )
    assert kv.snapshot_lengths == (128, 130)
    kv.write_attention(3, 0, np.zeros((70, 256), np.uint8), np.zeros((70, 64), np.uint8))
    kv.write_state(0, 100, [np.zeros(77824, np.uint8)])  # not a length that is stored
    kv.write_state(0, 128, [np.zeros(77824, np.uint8)])
    assert heard == [("kv", 0, 3, 70), ("state", 1, 0, 128)]


def test_blocks_without_pages_are_skipped_and_not_readable():
    layout = emulated_layout("gemma3", 64)
    full = job_pages(layout, 200)
    window = tuple(() if block == 0 else pages for block, pages in enumerate(full.blocks[1]))
    pages = replace(full, blocks=(full.blocks[0], window))
    kv = JobKV(layout, arena_for(layout, full), pages)
    kv.write_attention(0, 0, np.ones((200, 512), np.uint8), np.ones((200, 512), np.uint8))
    assert kv.read_attention(0, 64, 200)[0].all()
    with pytest.raises(PagesInvalid, match="token 63 of group 1"):
        kv.read_attention(0, 63, 200)


def test_missing_snapshot_is_an_error():
    layout = emulated_layout("kimi_linear", 64)
    pages = job_pages(layout, 100)
    with pytest.raises(PagesInvalid, match="no snapshot of group 1 at 64 tokens"):
        JobKV(layout, arena_for(layout, pages), pages).read_state(0, 64)


def test_nothing_is_written_after_revocation():
    layout = emulated_layout("llama", 64)
    pages = job_pages(layout, 10)
    arena = arena_for(layout, pages)
    kv = JobKV(layout, arena, pages)
    kv.revoke()
    kv.write_attention(0, 0, np.ones((10, 512), np.uint8), np.ones((10, 512), np.uint8))
    assert not arena.data.any()
    assert not kv.wants_state(10)


@pytest.mark.parametrize("bad", [(-1,), (99999,), (0, 1)])
def test_pages_outside_the_arena_are_refused(bad):
    layout = emulated_layout("llama", 64)
    pages = job_pages(layout, 10)
    arena = arena_for(layout, pages)
    with pytest.raises(PagesInvalid, match="do not fit group 0"):
        JobKV(layout, arena, replace(pages, blocks=((bad,),)))


def test_arena_file_is_shared(tmp_path):
    path = tmp_path / "arena"
    path.write_bytes(bytes(4096))
    MappedArena.open(path, 1024, 4).data[1030] = 7
    assert path.read_bytes()[1030] == 7
    with pytest.raises(PagesInvalid, match="5 pages need 5120"):
        MappedArena.open(path, 1024, 5)


def test_another_process_opens_the_arena_that_is_meant_or_none(tmp_path):
    path = tmp_path / "arena"
    path.write_bytes(bytes(4096))
    place = MappedArena.open(path, 1024, 4).place
    place.open().data[0] = 9
    assert path.read_bytes()[0] == 9
    path.rename(tmp_path / "the former agent's")
    path.write_bytes(bytes(4096))
    with pytest.raises(PagesInvalid, match="now another agent's"):
        place.open()


def test_whoever_was_lent_pages_on_is_told_when_they_are_given_up():
    layout = emulated_layout("llama", 64)
    pages = job_pages(layout, 10)
    kv, withdrawn = JobKV(layout, arena_for(layout, pages), pages), []
    kv.loan.share(lambda: withdrawn.append("first"))
    kv.revoke()
    assert withdrawn == ["first"]
    kv.loan.share(lambda: withdrawn.append("late"))
    assert withdrawn == ["first", "late"]


@pytest.mark.parametrize("hole", [None, 0, 1, 4, 9])
@pytest.mark.parametrize(("start", "stop"), [(0, 40), (3, 38), (4, 8), (5, 25), (17, 40)])
def test_blocks_that_are_moved_together_lie_where_each_of_them_would(hole, start, stop):
    """Pages shorter than a layer's K: each block is cut several times."""
    layout = ModelLayout("m", "u8", 4, (KVCacheGroup(FullAttention(24, 8), tuple(range(5))),))
    pages, rng = job_pages(layout, 40), np.random.default_rng(start)
    if hole is not None:
        pages = replace(pages, blocks=(tuple(() if at == hole else each for at, each in enumerate(pages.blocks[0])),))
    together, alone = (JobKV(layout, arena_for(layout, job_pages(layout, 40)), pages) for _ in range(2))
    rows = [(random_rows(rng, stop - start, 8), random_rows(rng, stop - start, 16)) for _ in range(5)]
    for layer, (k, v) in enumerate(rows):
        together.write_attention(layer, start, k, v)
        for token in range(stop - start):
            alone.write_attention(layer, start + token, k[token : token + 1], v[token : token + 1])
    assert np.array_equal(together.arena.data, alone.arena.data)
    if hole is not None and start // 4 <= hole <= (stop - 1) // 4:
        with pytest.raises(PagesInvalid, match=f"token {max(start, 4 * hole)} of group 0"):
            together.read_attention(3, start, stop)
    else:
        assert all(map(np.array_equal, together.read_attention(3, start, stop), rows[3]))

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_cache.cache.events import Medium
from hybrid_cache.index.digest import NAME_BYTES, ONE_IN, CacheDigest, DigestCleared, DigestPart, named_at, split_names
from tests.hybrid_cache.builders import hashes_of

CHAIN = hashes_of(list(range(4 * 64)))


def test_every_eighth_block_of_attention_has_a_name():
    chain = hashes_of(list(range(4 * 4096)))
    assert len(named_at(chain, len(chain))) == pytest.approx(len(chain) / ONE_IN, rel=0.2)
    assert named_at(chain, 0) == []


def test_what_comes_and_goes_between_two_words_is_not_told():
    digest = CacheDigest()
    digest.stored(0, CHAIN, Medium.MEMORY, is_sampled=False)
    digest.removed(0, CHAIN, Medium.MEMORY, is_sampled=False)
    assert digest.take() == []
    digest.stored(0, CHAIN[:2], Medium.MEMORY, is_sampled=False)
    assert digest.take() == [DigestPart(0, Medium.MEMORY, tuple(each[:NAME_BYTES] for each in CHAIN[:2]))]
    assert digest.take() == []


def test_a_name_goes_with_the_last_of_its_blocks():
    first = CHAIN[0]
    twin = first[:NAME_BYTES] + bytes(len(first) - NAME_BYTES)
    digest = CacheDigest()
    digest.stored(0, [first, twin], Medium.MEMORY, is_sampled=False)
    digest.take()
    digest.removed(0, [first], Medium.MEMORY, is_sampled=False)
    assert digest.take() == []
    digest.removed(0, [twin, CHAIN[1]], Medium.MEMORY, is_sampled=False)
    assert digest.take() == [DigestPart(0, Medium.MEMORY, (), (first[:NAME_BYTES],))]


def test_a_block_that_is_told_twice_counts_once():
    """As one that a snapshot has already, and whose event comes behind it."""
    digest = CacheDigest()
    for _ in range(2):
        digest.stored(0, CHAIN[:1], Medium.SSD, is_sampled=False)
    digest.take()
    digest.removed(0, CHAIN[:1], Medium.SSD, is_sampled=False)
    assert digest.take() == [DigestPart(0, Medium.MEMORY, (), (CHAIN[0][:NAME_BYTES],))]


def test_another_block_of_the_same_name_does_not_go_with_one_that_was_never_there():
    twin = CHAIN[0][:NAME_BYTES] + bytes(len(CHAIN[0]) - NAME_BYTES)
    digest = CacheDigest()
    digest.stored(0, CHAIN[:1], Medium.MEMORY, is_sampled=False)
    digest.take()
    digest.removed(0, [twin], Medium.MEMORY, is_sampled=False)
    assert digest.take() == []


def test_an_ssd_is_told_as_memory_and_an_engines_cache_apart():
    digest = CacheDigest()
    digest.stored(0, CHAIN[:1], Medium.MEMORY, is_sampled=False)
    digest.take()
    digest.stored(0, CHAIN[:1], Medium.SSD, is_sampled=False)
    digest.clear(Medium.MEMORY)
    assert digest.take() == []
    digest.clear(Medium.SSD)
    digest.stored(0, CHAIN[:1], Medium.ENGINE, is_sampled=False)
    name = CHAIN[0][:NAME_BYTES]
    assert set(digest.take()) == {DigestPart(0, Medium.MEMORY, (), (name,)), DigestPart(0, Medium.ENGINE, (name,))}


def test_all_cleared_is_told_before_what_is_new():
    digest = CacheDigest()
    digest.stored(0, CHAIN[:2], Medium.MEMORY, is_sampled=False)
    digest.clear()
    digest.stored(0, CHAIN[2:3], Medium.MEMORY, is_sampled=False)
    assert digest.take() == [DigestCleared(), DigestPart(0, Medium.MEMORY, (CHAIN[2][:NAME_BYTES],))]


def test_names_of_another_length_are_refused():
    with pytest.raises(ValueError, match="5 bytes of names"):
        split_names(bytes(5))


MEDIA = tuple(Medium)


@given(
    st.lists(
        st.tuples(st.sampled_from(["stored", "removed", "clear", "take"]), st.integers(0, 7), st.sampled_from(MEDIA))
    )
)
def test_changes_add_up_to_the_whole(steps: list[tuple[str, int, Medium]]):
    """One who hears every change knows what one is told who comes late."""
    digest, heard = CacheDigest(), dict[Medium, set[bytes]]()
    held = {medium: list[bytes]() for medium in MEDIA}
    rng = random.Random(0)
    for what, number, medium in (*steps, ("take", 0, MEDIA[0])):
        if what == "stored" and CHAIN[number] not in held[medium]:
            held[medium].append(CHAIN[number])
            digest.stored(0, [CHAIN[number]], medium, is_sampled=False)
        elif what == "removed" and held[medium]:
            gone = held[medium].pop(rng.randrange(len(held[medium])))
            digest.removed(0, [gone], medium, is_sampled=False)
        elif what == "clear":
            held[medium].clear()
            digest.clear(medium)
        elif what == "take":
            for event in digest.take():
                assert isinstance(event, DigestPart)
                names = heard.setdefault(event.medium, set())
                assert not names & {*event.added}
                assert names >= {*event.removed}
                names |= {*event.added}
                names -= {*event.removed}
    late: dict[Medium, set[bytes]] = {}
    for part in digest.whole(2):
        if isinstance(part, DigestPart):
            assert 0 < len(part.added) <= 2
            assert not late.setdefault(part.medium, set()) & {*part.added}
            late[part.medium] |= {*part.added}
    assert {medium: names for medium, names in heard.items() if names} == late
    by_hand = {
        Medium.MEMORY: {*held[Medium.MEMORY], *held[Medium.SSD]},
        Medium.ENGINE: {*held[Medium.ENGINE]},
    }
    assert late == {medium: {each[:NAME_BYTES] for each in hashes} for medium, hashes in by_hand.items() if hashes}

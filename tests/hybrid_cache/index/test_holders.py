import os
import random

from hybrid_cache.index.holders import HolderSets

HIGH = 1 << 2000  # the bit of the thousandth node: an int of 300 bytes


def test_neighbours_share_what_says_who_holds_them() -> None:
    holders, names = HolderSets(), [os.urandom(32) for _ in range(1000)]
    holders.add(names, HIGH)
    assert len({id(some) for some in holders.of_all(names)}) == 1
    holders.add(names[:600], HIGH << 1)
    holders.add(names[300:], 1)
    found = holders.of_all(names)
    assert len({id(some) for some in found}) == 3
    assert found == [HIGH | HIGH << 1] * 300 + [HIGH | HIGH << 1 | 1] * 300 + [HIGH | 1] * 400
    holders.remove(names[100:], HIGH << 1)
    assert len({id(some) for some in holders.of_all(names)}) <= 4
    assert holders.sets_bytes < 4 * 400


def test_holders_that_are_alone_again_are_the_same_int_in_whichever_order_others_leave() -> None:
    holders, rng = HolderSets(), random.Random(0)
    names = [[os.urandom(32) for _ in range(50)] for _ in range(20)]
    for node, own in enumerate(names):
        holders.add(own, HIGH << node)
    everything = [name for own in names for name in own]
    holders.add(everything, 1)
    rng.shuffle(everything)
    for at in range(0, len(everything), 100):
        holders.remove(everything[at : at + 100], 1)
    assert len({id(some) for some in holders.of_all(everything)}) == len(names)


def test_what_is_removed_is_gone() -> None:
    holders, names = HolderSets(), [os.urandom(32) for _ in range(50)]
    holders.add(names, 2)
    holders.add(names[10:30], 1)
    holders.remove([*names[20:40], os.urandom(32)], 2)
    assert holders.of_all(names) == [2] * 10 + [3] * 10 + [1] * 10 + [0] * 10 + [2] * 10
    assert len(holders) == 40

from hypothesis import given
from hypothesis import strategies as st

from hybrid_cache.index.everyone import CHUNK_BLOCKS, SnapshotLengths, leading_blocks, unbroken_blocks
from hybrid_cache.index.holders import HolderSets

CHAIN = [number.to_bytes(2) for number in range(4 * CHUNK_BLOCKS)]
LENGTHS = st.integers(0, len(CHAIN))
POSITIONS = st.sets(st.integers(0, len(CHAIN) - 1), max_size=12)


def holders(held: dict[int, set[int]]) -> HolderSets:
    """Who holds which block: by bit, positions in the chain."""
    found = HolderSets()
    for bit, positions in held.items():
        found.add([CHAIN[at] for at in positions], bit)
    return found


@given(st.lists(LENGTHS, min_size=1, max_size=8), LENGTHS)
def test_leading_blocks_are_each_nodes_own(lengths, limit):
    held = holders({1 << node: set(range(length)) for node, length in enumerate(lengths)})
    found = {}
    for length, nodes in leading_blocks([held], (1 << len(lengths)) - 1, CHAIN, limit):
        found |= {node: length for node in range(len(lengths)) if nodes >> node & 1}
    assert found == {node: min(length, limit) for node, length in enumerate(lengths)}


@given(st.lists(POSITIONS, min_size=2, max_size=2), LENGTHS, LENGTHS)
def test_a_missing_block_ends_what_is_unbroken(missing, one, other):
    start, limit = sorted((one, other))
    groups = [holders({2: set(range(len(CHAIN))) - gone}) for gone in missing]
    gaps = [at for gone in missing for at in gone if start <= at < limit]
    assert unbroken_blocks(groups, 0b110, CHAIN, start, limit) == min([*gaps, limit])


@given(
    st.lists(st.tuples(POSITIONS, POSITIONS), min_size=1, max_size=4), st.lists(st.tuples(st.integers(0, 3), LENGTHS))
)
def test_the_longest_snapshot_is_one_of_every_group(nodes, questions):
    groups = [holders({1 << node: both[group] for node, both in enumerate(nodes)}) for group in (0, 1)]
    everybody = (1 << len(nodes)) - 1
    snapshots = SnapshotLengths(groups, CHAIN, everybody)

    def expected(node, limit):
        both = set.intersection(*nodes[node]) if node < len(nodes) else set[int]()
        return max([at + 1 for at in both if at < limit], default=0)

    for node, limit in questions:
        assert snapshots.longest(1 << node, limit) == expected(node, limit)
        found = [
            (length, each)
            for length, some in snapshots.split(everybody, limit)
            for each in range(4)
            if some >> each & 1
        ]
        assert sorted(found) == sorted((expected(each, limit), each) for each in range(len(nodes)))

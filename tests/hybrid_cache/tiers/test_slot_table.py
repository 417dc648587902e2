from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from hybrid_cache.tiers.slot_table import TAIL_BYTES, SlotTable

NAMES = [bytes([number]) * 32 for number in range(9)]
SLOTS = 4


def order_of(table: SlotTable) -> list[bytes]:
    order = table.uses().order()
    return [order[at : at + TAIL_BYTES] for at in range(0, len(order), TAIL_BYTES)]


@given(st.lists(st.tuples(st.sampled_from(["put", "fail", "use", "forget"]), st.sampled_from(NAMES)), max_size=40))
def test_a_table_is_an_lru_of_slots(steps: list[tuple[str, bytes]]) -> None:
    table, model = SlotTable(SLOTS), OrderedDict[bytes, int]()
    for step, name in steps:
        if step in ("put", "fail") and name not in table:
            slot, gone = table.take()
            assert slot not in model.values() or model.get(gone or b"") == slot
            assert (gone is None) == (len(model) < SLOTS)
            if gone is not None:
                assert model.popitem(last=False)[0] == gone
            if step == "fail":
                table.give_back(slot)
                continue
            table.place(name, slot)
            model[name] = slot
        elif name in table and step == "use":
            table.used(name)
            model.move_to_end(name)
        elif name in table and step == "forget":
            table.forget(name)
            del model[name]
        assert order_of(table) == [each[-TAIL_BYTES:] for each in model]
        assert {each: table.slot_of(each) for each in model} == model
        assert set(table.blocks_in(0, SLOTS)) == set(model)
        assert len(table) == len(model)


@given(st.lists(st.sampled_from([None, *NAMES]), max_size=SLOTS), st.permutations(NAMES), st.integers(0, len(NAMES)))
def test_what_lay_in_slots_comes_back_in_its_order(blocks: list[bytes | None], order: list[bytes], known: int) -> None:
    saved = order[:known]
    table = SlotTable(SLOTS)
    first = [block for at, block in enumerate(blocks) if block is not None and blocks.index(block) == at]
    assert table.recover(blocks, b"".join(name[-TAIL_BYTES:] for name in saved)) == len(first)
    expected = sorted(first, key=lambda name: saved.index(name) if name in saved else len(saved))
    assert order_of(table) == [name[-TAIL_BYTES:] for name in expected]
    free = [table.take() for _ in range(SLOTS - len(first))]
    assert {slot for slot, _ in free}.isdisjoint(table.slot_of(name) for name in first)
    assert [gone for _, gone in free] == [None] * len(free)
    assert [slot for slot, _ in free] == sorted(slot for slot, _ in free)


def test_slots_that_were_never_taken_cost_no_objects() -> None:
    table = SlotTable(1 << 30)
    assert (table.num_taken, table.take(), table.num_taken) == (0, (0, None), 1)


def test_a_table_is_read_in_parts() -> None:
    table = SlotTable(8)
    for name in NAMES[:6]:
        table.place(name, table.take()[0])
    table.forget(NAMES[1])
    assert [table.blocks_in(start, start + 2) for start in range(0, 8, 2)] == [NAMES[:1], NAMES[2:4], NAMES[4:6], []]

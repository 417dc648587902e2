"""Pages and items by pointer, in the host's memory."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from engine.errors import PagesInvalid  # noqa: E402
from engine.sglang.disaggregation.buffers import PageBuffers, read_item, write_item  # noqa: E402
from engine.sglang.disaggregation.pools import Buffer, Pools  # noqa: E402

PAGE, PAGES, ITEM = 4, 6, 4 * 24


def a_pool() -> tuple[torch.Tensor, PageBuffers]:
    """Memory [pages, bytes of a page], and the same by its pointer."""
    memory = torch.arange(PAGES * ITEM, dtype=torch.int32).to(torch.uint8).reshape(PAGES, ITEM).clone()
    return memory, PageBuffers(Pools(buffers=(of(memory),), page_tokens=PAGE, dtype="uint8", device="cpu"))


def of(memory: torch.Tensor) -> Buffer:
    return Buffer(pointer=memory.data_ptr(), num_bytes=memory.nbytes, item_bytes=memory.nbytes // len(memory))


def test_pages_are_read_as_rows_of_tokens_in_the_order_asked_for():
    memory, buffers = a_pool()
    assert len(buffers) == 1
    tokens = buffers.read(0, buffers.select(np.array([5, 0, 2], np.int32)))
    assert tokens.shape == (3 * PAGE, ITEM // PAGE)
    assert np.array_equal(tokens.reshape(3, ITEM), memory.numpy()[[5, 0, 2]])


def test_what_is_written_is_in_the_pool_and_nowhere_else():
    memory, buffers = a_pool()
    before = memory.clone()
    buffers.write(0, buffers.select(np.array([4, 1], np.int32)), np.full((2 * PAGE, ITEM // PAGE), 7, np.uint8))
    assert (memory[[1, 4]] == 7).all()
    assert torch.equal(memory[[0, 2, 3, 5]], before[[0, 2, 3, 5]])


@pytest.mark.parametrize("page", [-1, PAGES])
def test_pages_that_are_not_there_are_neither_read_nor_written(page):
    _, buffers = a_pool()
    with pytest.raises(PagesInvalid):
        buffers.read(0, buffers.select(np.array([0, page], np.int32)))
    with pytest.raises(PagesInvalid):
        buffers.write(0, buffers.select(np.array([page], np.int32)), np.zeros((PAGE, ITEM // PAGE), np.uint8))


def test_an_item_is_read_and_written_whole():
    memory, _ = a_pool()
    write_item(of(memory), 3, b"\x05" * ITEM)
    assert read_item(of(memory), 3) == b"\x05" * ITEM
    for index, data in ((PAGES, b"\0" * ITEM), (-1, b"\0" * ITEM), (0, b"\0" * (ITEM + 1))):
        with pytest.raises(PagesInvalid):
            write_item(of(memory), index, data)

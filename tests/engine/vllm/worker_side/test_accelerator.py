"""What of the port to an accelerator needs none: registering memory, piece by piece, or not at all."""

import pytest
import torch

from engine.vllm.worker_side.accelerator import DirectCopies, chunks, device_of, register_in_chunks
from engine.vllm.worker_side.device import HostDevice

CHUNK = 100


class Driver:
    """Registers `most` pieces, and notes which are there."""

    def __init__(self, most: int = 99) -> None:
        self.there: dict[int, int] = {}
        self.populated: list[tuple[int, int]] = []
        self._most = most

    def direct(self) -> DirectCopies:
        return DirectCopies(lambda sources, targets, sizes: None, self.register, self.there.pop)

    def register(self, address: int, size: int) -> bool:
        assert (address, size) in self.populated, "else the driver asks for each page while launches wait"
        if len(self.there) == self._most:
            return False
        self.there[address] = size
        return True

    def populate(self, address: int, size: int) -> None:
        self.populated.append((address, size))


def register(driver: Driver, size: int, stop=lambda: False) -> bool:
    return register_in_chunks(1000, size, driver.direct(), stop=stop, populate=driver.populate, chunk_bytes=CHUNK)


@pytest.mark.parametrize(("size", "pieces"), [(250, {1000: 100, 1100: 100, 1200: 50}), (100, {1000: 100}), (0, {})])
def test_memory_is_registered_in_pieces(size, pieces):
    driver = Driver()
    assert register(driver, size)
    assert driver.there == pieces == dict(chunks(1000, size, CHUNK))


def test_where_a_piece_fails_none_stays_registered():
    driver = Driver(most=2)
    assert not register(driver, 250)
    assert driver.there == {}


def test_a_worker_that_ends_leaves_nothing_registered():
    driver = Driver()
    assert not register(driver, 250, stop=lambda: len(driver.there) == 1)
    assert driver.there == {}


def test_a_hosts_tensors_need_no_accelerator():
    assert isinstance(device_of(torch.device("cpu")), HostDevice)

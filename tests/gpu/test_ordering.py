"""The rounds of part A, on the lazy device: they pass with the waits, and fail without. A GPU runs them as they are."""

import pytest
import torch

from tests.engine.vllm.worker_side.lazy_device import LazyDevice
from tests.gpu import __main__ as gpu
from tests.gpu.ordering import ordering, rates


class LazyMachine:
    def __init__(self, *, registers: bool = True) -> None:
        self.port = LazyDevice(registers=registers)
        self.torch_device = torch.device("cpu")
        self.launch = self.port.launch
        self.synchronize = self.port.synchronize


@pytest.mark.parametrize("registers", [True, False])
def test_the_rounds_pass_with_waits(registers: bool) -> None:
    assert ordering(LazyMachine(registers=registers), registered=registers, rounds=2) == []


@pytest.mark.parametrize("registers", [True, False])
def test_the_rounds_fail_without_waits(registers: bool) -> None:
    assert ordering(LazyMachine(registers=registers), registered=registers, waits=False, rounds=2)


def test_rates_are_taken_each_way() -> None:
    found = rates(LazyMachine(), total_bytes=1 << 20, block_bytes=64 << 10, registered=True)
    assert found["is_registered"]
    assert found["to_host_gb_per_s"] > 0
    assert found["to_device_gb_per_s"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU: `make test-gpu` says what becomes of it")
def test_a_part_that_lacks_what_it_needs_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 0
    assert "A: skipped needs PyTorch with CUDA" in capsys.readouterr().out

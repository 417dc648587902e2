"""The first GPU, and copies between it and registered memory: with vLLM's own call where it is installed, else by CUDA's
driver.
"""

import ctypes
import importlib.util
from collections.abc import Callable

import torch

from engine.vllm import internals
from engine.vllm.worker_side.accelerator import AcceleratorDevice, DirectCopies

SLOW_MATMULS, SLOW_SIZE = 8, 8192  # about 10 ms
BATCH_SINCE = 12080  # CUDA's version
IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM


class Gpu:
    """The first GPU, and a model that is slow."""

    def __init__(self, *, registers: bool = True) -> None:
        self.torch_device = torch.device("cuda", 0)
        self.copies_with, direct = direct_copies()
        self._matrix = torch.ones((SLOW_SIZE, SLOW_SIZE), dtype=torch.bfloat16, device=self.torch_device)
        self.port = AcceleratorDevice(self.torch_device, direct if registers else None)

    def launch(self, work: Callable[[], object]) -> None:
        for _ in range(SLOW_MATMULS):
            torch.mm(self._matrix, self._matrix)
        work()

    def synchronize(self) -> None:
        torch.cuda.synchronize()


class Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_uint), ("id", ctypes.c_int)]


class Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = [("order", ctypes.c_uint), ("source", Location), ("target", Location), ("flags", ctypes.c_uint)]


BatchFunction = ctypes.CFUNCTYPE(
    ctypes.c_uint,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_void_p,
)


def direct_copies() -> tuple[str, DirectCopies]:
    """What copies are made with, by name."""
    if importlib.util.find_spec("vllm") is not None and (theirs := internals.direct_copies()) is not None:
        return "vllm swap_blocks_batch", theirs
    library = ctypes.CDLL("libcuda.so.1")
    name, copy = _batch(library) or _one_by_one(library)
    return name, DirectCopies(copy, _register, torch.cuda.cudart().cudaHostUnregister)


def _register(address: int, size: int) -> bool:
    return int(torch.cuda.cudart().cudaHostRegister(address, size, 0)) == 0


def _batch(library: ctypes.CDLL) -> tuple[str, Callable[..., None]] | None:
    found = ctypes.c_void_p()
    symbol = ctypes.c_char_p(b"cuMemcpyBatchAsync")
    flags, status = ctypes.c_uint64(0), ctypes.c_int()
    if not hasattr(library, "cuGetProcAddress_v2"):
        return None
    asked = library.cuGetProcAddress_v2(symbol, ctypes.byref(found), BATCH_SINCE, flags, ctypes.byref(status))
    if asked or not found.value:
        return None
    call = BatchFunction(found.value)
    attributes, first, failed = Attributes(order=IN_STREAM_ORDER), ctypes.c_size_t(0), ctypes.c_size_t(0)

    def copy(sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor) -> None:
        error = call(
            targets.data_ptr(),
            sources.data_ptr(),
            sizes.data_ptr(),
            len(sizes),
            ctypes.byref(attributes),
            ctypes.byref(first),
            1,
            ctypes.byref(failed),
            torch.cuda.current_stream().cuda_stream,
        )
        if error:
            raise RuntimeError(f"cuMemcpyBatchAsync: error {error} at copy {failed.value} of {len(sizes)}")

    return "cuMemcpyBatchAsync", copy


def _one_by_one(library: ctypes.CDLL) -> tuple[str, Callable[..., None]]:
    call = library.cuMemcpyAsync
    call.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)

    def copy(sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
            if error := call(target, source, size, stream):
                raise RuntimeError(f"cuMemcpyAsync: error {error}")

    return "cuMemcpyAsync", copy

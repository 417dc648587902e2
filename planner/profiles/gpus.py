"""GPUs by name: memory, as drivers report it, and the most they compute, as data sheets print it (dense, without sparsity).

A data sheet's 80 GB are 80 GiB less what error correction takes; engines see what the driver reports. The peaks are for
plausibility only: a prefill that took less than the peak allows was not computed.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from planner.errors import InputError

MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU. Its peaks are those of 16-bit and of 8-bit numbers, and of 4-bit ones where it has them."""

    name: str
    memory_bytes: float
    tflops_16: float
    tflops_8: float
    tflops_4: float | None = None
    is_known: bool = True  # by name, not by hand

    def peak_flops(self, weight_bytes: float) -> float:
        """With weights of so many bytes each: the fastest arithmetic that they allow."""
        if weight_bytes > 1.5:
            return self.tflops_16 * 1e12
        if weight_bytes > 0.75 or self.tflops_4 is None:
            return self.tflops_8 * 1e12
        return self.tflops_4 * 1e12


def _gpu(name: str, memory_mib: int, tflops_16: float, tflops_8: float, tflops_4: float | None = None) -> Gpu:
    return Gpu(name=name, memory_bytes=memory_mib * MIB, tflops_16=tflops_16, tflops_8=tflops_8, tflops_4=tflops_4)


GPUS: Final = MappingProxyType[str, Gpu](
    {
        gpu.name: gpu
        for gpu in (
            _gpu("A100", 81_920, 312, 624),
            _gpu("A100-40GB", 40_960, 312, 624),
            _gpu("A800", 81_920, 312, 624),
            _gpu("L20", 46_068, 119.5, 239),
            _gpu("L40S", 46_068, 362, 733),
            _gpu("H20", 97_871, 148, 296),
            _gpu("H20-141GB", 143_771, 148, 296),
            _gpu("H100", 81_559, 989, 1979),
            _gpu("H800", 81_559, 989, 1979),
            _gpu("H200", 143_771, 989, 1979),
            _gpu("GH200", 146_831, 989, 1979),
            _gpu("B200", 183_359, 2250, 4500, 9000),
            _gpu("GB200", 189_471, 2500, 5000, 10_000),
            _gpu("B300", 275_040, 2250, 4500, 14_000),
            _gpu("GB300", 284_208, 2500, 5000, 15_000),
            _gpu("MI300X", 196_592, 1307, 2615),
            _gpu("MI325X", 262_128, 1307, 2615),
            _gpu("MI355X", 294_896, 2517, 5034, 10_068),
        )
    }
)


def gpu_named(name: str) -> Gpu:
    """Raises InputError naming those that are known."""
    for known in GPUS.values():
        if known.name.lower() == name.lower().removeprefix("nvidia-").removesuffix("_sxm"):
            return known
    raise InputError(
        f"--gpu {name}: not known; known are {', '.join(GPUS)}. For another one give --gpu-memory-gb, and "
        "--gpu-tflops for the check that it can have been so fast"
    )

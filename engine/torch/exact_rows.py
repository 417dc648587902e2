"""Arithmetic that gives every sequence of a batch the very bits that it would have alone. Tokens must not depend on the
other requests, and torch's kernels do not promise that. A product of many rows adds up in another order than that of
one. exp and similar functions take another path for elements that do not fill a vector. This module computes such
operations row by row, and everything else on the whole batch: most of a small model's step is calls, not arithmetic.
"""

# torch ships partial annotations.
# mypy: disable-error-code="misc,no-untyped-call"

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

# Kernels take elements in strides of two vectors of up to 16 floats; the rest of a row goes through scalar code.
WHOLE_VECTORS: Final = 64
ONE_THREAD_ELEMENTS: Final = 32768  # ATen's grain: more are split among threads, wherever that cuts vectors
TRIED_ROWS: Final = 16

_BY_VECTORS: Final = (
    *(
        "exp",
        "exp2",
        "expm1",
        "log",
        "log2",
        "log10",
        "log1p",
        "logsigmoid",
        "sigmoid",
        "silu",
        "softplus",
        "tanh",
        "erf",
    ),
    *("gelu", "elu", "mish", "sin", "cos"),
)


class ExactRows(TorchFunctionMode):
    """While it is entered, and in this thread alone, dimension 0 of tensors is `num_rows` sequences, one token each."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self._num_rows = num_rows

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if (exact := _EXACT.get(func)) is not None:
            return exact(self._num_rows, func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def each_for_itself() -> Any:
    """In it no operation is looked at: it is one sequence's alone, and a look costs as much as a small operation."""
    return torch._C.DisableTorchFunction()


def _linear(num_rows: int, func: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
    if x.shape[0] != num_rows:
        return F.linear(x, weight, bias)
    if bias is None and x.numel() == num_rows * x.shape[-1]:
        return _products(x.reshape(num_rows, -1), weight.t()).view(*x.shape[:-1], -1)
    return torch.cat([F.linear(row, weight, bias) for row in x.split(1)])


def _grouped_mm(
    num_rows: int, func: Any, x: torch.Tensor, weight: torch.Tensor, offs: Any = None, **kwargs: Any
) -> torch.Tensor:
    """Rows [offs[e - 1], offs[e]) of `x` go through expert `e`."""
    if offs is None or kwargs.get("bias") is not None:
        raise NotImplementedError("this way of grouping experts")
    parts, start = [], 0
    for expert, stop in enumerate(offs.tolist()):
        if stop > start:
            parts.append(_products(x[start:stop], weight[expert]))
        start = stop
    return torch.cat(parts)


def _elementwise(num_rows: int, func: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if not x.dim() or x.shape[0] % num_rows:
        return func(x, *args, **kwargs)  # nothing of a sequence's
    whole = x.is_contiguous() and x.numel() // num_rows % WHOLE_VECTORS == 0
    if whole and (x.numel() <= ONE_THREAD_ELEMENTS or torch.get_num_threads() == 1):
        return func(x, *args, **kwargs)
    return torch.cat([func(rows, *args, **kwargs) for rows in x.chunk(num_rows)])


def _products(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Each row of `x`, [rows, k], times `weight`, [k, n], as if it were the only one."""
    if len(x) > 1 and _batches_exactly(weight.shape, weight.stride(), weight.dtype):
        return torch.bmm(x.unsqueeze(1), weight.expand(len(x), *weight.shape)).squeeze(1)
    return torch.cat([torch.mm(row, weight) for row in x.split(1)])


@cache
def _batches_exactly(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether products of one row each have the same bits in one call as in many, with this machine's kernels."""
    numbers = torch.Generator().manual_seed(0)
    x = torch.randn((TRIED_ROWS, shape[0]), generator=numbers).to(dtype)
    values = torch.randn(tuple(shape), generator=numbers).to(dtype)
    weight = torch.empty_strided(shape, stride, dtype=dtype).copy_(values)
    together = torch.bmm(x.unsqueeze(1), weight.expand(TRIED_ROWS, *shape)).squeeze(1)
    return torch.equal(together, torch.cat([torch.mm(row, weight) for row in x.split(1)]))


def _everywhere(names: Sequence[str]) -> list[Any]:
    """torch has most functions twice, and as a method of tensors."""
    places = [
        vars(place).get(name) or getattr(place, name, None) for name in names for place in (torch, torch.Tensor, F)
    ]
    return [function for function in places if function is not None]


_EXACT: Final[dict[Any, Callable[..., Any]]] = {
    **dict.fromkeys(_everywhere(["linear"]), _linear),
    **dict.fromkeys(_everywhere(["grouped_mm", "_grouped_mm"]), _grouped_mm),
    **dict.fromkeys(_everywhere(_BY_VECTORS), _elementwise),
}

"""What a start ended of: final, of the kind that may pass, or unclear."""

import pytest

from node.engine.start_failure import MOST_CHARACTERS, Cause, cause_in

VLLM = "(EngineCore pid=12) ERROR 11-23 14:29:34 [core.py:1510] "
ROOT = "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above."


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("", None),
        ("INFO all is well\nErrors: none\n", None),
        ("engine: cannot serve: no attention layer\n", Cause("no attention layer", True)),
        (
            f"{VLLM}engine: cannot serve: KVCache of kind X cannot be transferred\n{VLLM}Traceback\n{ROOT}",
            Cause("KVCache of kind X cannot be transferred", True),
        ),
        (f"{VLLM}ValueError: no such quantisation\n{ROOT}", Cause("ValueError: no such quantisation", True)),
        (
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n  Value error, unknown\n",
            Cause("ValidationError: Value error, unknown", True),
        ),
        (f"{VLLM}RuntimeError: size of tensor a\n{ROOT}", Cause("RuntimeError: size of tensor a", False)),
        (f"{VLLM}ValueError: Free memory on device is less than desired\n{ROOT}", None),
        (f"{VLLM}OSError: [Errno 98] Address already in use\n", None),
        (f"{VLLM}torch.cuda.OutOfMemoryError: CUDA\n{ROOT}", None),
        (f"{VLLM}torch.distributed.DistBackendError: NCCL error in: x.cpp:9, remote process exited\n{ROOT}", None),
        ("KeyError\n", Cause("KeyError:", True)),
        (f"ValueError: {'x' * 9999}\n", Cause(f"ValueError: {'x' * 9999}"[: MOST_CHARACTERS - 1] + "…", True)),
    ],
)
def test_the_cause_of_an_end(log: str, cause: Cause | None) -> None:
    assert cause_in(log) == cause

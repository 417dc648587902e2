"""The models of `make test-gpu` fit vLLM's own classes for a GPU: each of their parameters is filled. Kernels are left out.

A process of its own takes the place of what needs a device: vLLM's choice of kernels for attention, and streams.
"""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.gpu.models import write_all

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

CLASSES: Final = {
    "deepseek_v3_2": "vllm.models.deepseek_v32.nvidia.model:DeepseekV32ForCausalLM",
    "kimi_linear_6_2": "vllm.models.kimi_k3.nvidia.model:KimiLinearForCausalLM",
    "nemotron_h_slice": "vllm.model_executor.models.nemotron_h:NemotronHForCausalLM",
    "deepseek_v3_latents": "vllm.model_executor.models.deepseek_v2:DeepseekV3ForCausalLM",
}
ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_KIMI_K3_GEMM_AR": "0",  # its kernel is imported at once
}
LOAD_S: Final = 600.0


@pytest.mark.parametrize("name", CLASSES)
def test_every_parameter_of_the_class_is_filled(name: str, tmp_path: Path) -> None:
    write_all(tmp_path, [name])
    assert not list(tmp_path.glob("*.failed"))
    argv = [sys.executable, "-m", "tests.vllm.pairs.test_gpu_classes", str(tmp_path / name), CLASSES[name]]
    found = subprocess.run(argv, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=LOAD_S)
    assert found.returncode == 0, found.stderr[-2000:]
    *_, said = found.stdout.splitlines()
    filled, _, unfilled = said.partition(" unfilled ")
    assert int(filled) > 40
    assert unfilled == "[]"


class NoKernel:
    """Instead of those of attention: vLLM asks it how many devices share a context."""

    dcp_world_size = 1

    def __init__(self, *args: object, **options: object) -> None:
        pass

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class NoStream:
    """A type, because vLLM's annotations name it as one."""

    def __init__(self, *args: object, **options: object) -> None:
        pass


class NoBackend:
    @staticmethod
    def get_name() -> str:
        return "NONE"

    @staticmethod
    def get_impl_cls() -> type[NoKernel]:
        return NoKernel


def unfilled(path: Path, place: str) -> tuple[int, list[str]]:
    """How many parameters vLLM's class has, and which its loader leaves as they were. For a process that ends then."""
    import torch
    from safetensors.torch import load_file
    from vllm.config import CacheConfig, ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.utils.torch_utils import set_default_torch_dtype

    if ".nvidia." in place:
        mla_attention.get_attn_backend = lambda *args, **options: NoBackend
        torch.cuda.Stream = torch.cuda.Event = NoStream
    model = ModelConfig(model=str(path), tokenizer=str(path), dtype="bfloat16", max_model_len=4096, enforce_eager=True)
    config = VllmConfig(model_config=model, cache_config=CacheConfig(enable_prefix_caching=False))
    module, _, name = place.rpartition(":")
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{path.parent}/met", 0, "gloo")
        initialize_model_parallel(1, 1)
        with set_default_torch_dtype(torch.bfloat16):
            made = getattr(importlib.import_module(module), name)(vllm_config=config, prefix="")
        filled = made.load_weights(iter(load_file(path / "model.safetensors").items()))
    names = {name for name, _ in made.named_parameters()}
    return len(names), sorted(names - set(filled))


if __name__ == "__main__":
    print(*unfilled(Path(sys.argv[1]), sys.argv[2]), sep=" unfilled ")

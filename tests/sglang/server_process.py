"""A server of SGLang on a CPU: `python -m tests.sglang.server_process ARGUMENTS`, as of `sglang serve`.

SGLang takes layers' kernels for a CPU without its own ones from vLLM, by name, and calls their PyTorch forms where they are no
use. The names are enough, so that no vLLM is needed. Processes that the server spawns import this module again, before SGLang.
"""

import sys
import types

import torch

if "vllm" not in sys.modules:
    for operator in ("nms", "qnms"):  # as in conftest.py
        torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    operators = types.ModuleType("vllm._custom_ops")
    for name in ("rms_norm", "fused_add_rms_norm", "rotary_embedding"):
        setattr(operators, name, None)
    sys.modules |= {"vllm": types.ModuleType("vllm"), "vllm._custom_ops": operators}

if __name__ == "__main__":
    from sglang.srt.plugins import load_plugins

    load_plugins()  # as both of SGLang's commands do, before they read arguments

    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(sys.argv[1:]))

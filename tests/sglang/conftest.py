"""SGLang's classes on a machine without its kernels.

The package index has torchvision for CUDA alone. Its operators cannot be loaded beside a CPU build of torch, and it wants two
of them declared when it is imported: so they are, and nothing here calls them.
"""

import importlib.util

if importlib.util.find_spec("sglang") is not None:
    import torch

    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

"""Found by every Python whose PYTHONPATH has this directory: SGLang on a machine without its kernels.

The package index has torchvision for CUDA alone. Its operators cannot be loaded beside a CPU build of torch, and two of them
must be declared when it is imported. This file declares them right before; nothing calls them. `vllm` beside it does the
rest.
"""

import sys


class _DeclaresOperators:
    """Finds nothing itself."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            for operator in ("nms", "qnms"):
                torch.library.define(
                    f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )


sys.meta_path.insert(0, _DeclaresOperators())

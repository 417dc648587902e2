"""Which models have renderers of their own."""

from pathlib import Path

import pytest

from prompts.chat.renderers import renders_otherwise


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ('{"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]}', True),
        ('{"model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"]}', True),
        ('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}', False),
        ('{"model_type": ["gpt_oss"], "architectures": [{}]}', False),
        ("{}", False),
        ("[]", False),
        ("no JSON", False),
        (None, False),
    ],
)
def test_a_models_own_config_tells(config: str | None, expected: bool, tmp_path: Path) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert renders_otherwise(tmp_path) is expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (("consolidated.safetensors", "tekken.json"), True),
        (("consolidated-00001-of-00002.safetensors", "tokenizer.model.v3"), True),
        (("consolidated.safetensors", "tokenizer.json"), False),
        (("model.safetensors", "tekken.json"), False),
    ],
)
def test_so_do_the_files_of_mistral(files: tuple[str, ...], expected: bool, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).touch()
    assert renders_otherwise(tmp_path) is expected

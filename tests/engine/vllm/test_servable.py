"""What is refused before a server is started, and what is not."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.vllm.launch import main
from engine.vllm.servable import complaint_about_model, complaint_about_parallelism, refusal_of

HYBRID = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "layer_types": ["linear_attention"]}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "encoder-decoder"),
        ({"architectures": ["BertForSequenceClassification"]}, "generates nothing"),
        ({"architectures": ["XLMRobertaModel"]}, "generates nothing"),
        ({"architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2"}, "no attention layer"),
        ({"architectures": ["X"], "text_config": {"model_type": "falcon_mamba"}}, "no attention layer"),
    ],
)
def test_a_model_that_cannot_be_served(config: dict[str, Any], words: str) -> None:
    assert words in (refusal_of(config) or "")


@pytest.mark.parametrize(
    "config",
    [
        {},
        HYBRID,
        {"architectures": None},
        {"architectures": [5]},
        {"architectures": ["ChatGLMModel"]},
        {"architectures": ["GPT2LMHeadModel"]},
        {"text_config": HYBRID, "architectures": ["A"]},
    ],
)
def test_a_model_of_which_nothing_is_known_to_be_wrong(config: dict[str, Any]) -> None:
    assert refusal_of(config) is None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--speculative-config", "{}"], "speculative"),
        (["--speculative_config={}"], "speculative"),
        (["--prefill-context-parallel-size", "2"], "context parallelism"),
        (["-dcp", "4"], "context parallelism"),
        (["--data-parallel-size=2"], "each data parallel rank"),
    ],
)
def test_flags_that_cannot_be_followed(flags: list[str], words: str) -> None:
    assert words in (complaint_about_parallelism(flags) or "")


@pytest.mark.parametrize(
    "flags", [[], ["--pipeline-parallel-size", "2"], ["--data-parallel-size"], ["--tensor-parallel-size", "8"]]
)
def test_flags_that_can(flags: list[str]) -> None:
    assert complaint_about_parallelism(flags) is None


def test_a_directory_is_looked_into(tmp_path: Path) -> None:
    assert complaint_about_model("org/name") is None
    assert complaint_about_model(str(tmp_path)) is None
    (tmp_path / "config.json").write_text("{")
    assert "cannot be read" in (complaint_about_model(str(tmp_path)) or "")
    (tmp_path / "config.json").write_text("[]")
    assert "no JSON object" in (complaint_about_model(str(tmp_path)) or "")


def test_nothing_is_started_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}))
    arguments = ["--model", str(tmp_path), "--agent-socket", str(tmp_path / "s")]
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("engine: cannot serve: MambaForCausalLM has no attention layer")

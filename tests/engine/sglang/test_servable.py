from pathlib import Path

import pytest

from engine.sglang.servable import NotServable, complaint_about_flags, config_of, context_of


@pytest.mark.parametrize(
    "flag",
    ["--port", "--port=1", "--disaggregation-mode", "--disaggregation_mode=decode", "--kv-events-config", "--config"],
)
def test_flags_that_the_node_speaks_for_are_refused(flag: str) -> None:
    complaint = complaint_about_flags((flag,))
    assert complaint is not None
    assert "is set by the node: use its " in complaint


@pytest.mark.parametrize(
    "flags",
    [("--tp", "2"), ("--tp-size=4",), ("--dp-size", "2"), ("--pp-size", "2"), ("--enable-lora",), ("--api-key", "secret"),
     ("--enable-hierarchical-cache",), ("--speculative-algorithm", "EAGLE"), ("--skip-tokenizer-init",)],
)  # fmt: skip
def test_what_the_backend_cannot_follow_is_refused(flags: tuple[str, ...]) -> None:
    complaint = complaint_about_flags(flags)
    assert complaint is not None
    assert "secret" not in complaint


def test_other_flags_pass() -> None:
    assert complaint_about_flags(("--tp", "1", "--device", "cpu", "--mem-fraction-static=0.5")) is None


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (None, "cannot be read"),
        ("[]", "no JSON object"),
        ("{", "cannot be read"),
        ('{"is_encoder_decoder": true}', "decoder"),
    ],
)
def test_models_that_cannot_be_served(tmp_path: Path, config: str | None, why: str) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(NotServable, match=why):
        config_of(str(tmp_path))


def test_others_can_and_say_for_which_prompts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 4096}')
    assert context_of(config_of(str(tmp_path))) == 4096
    assert context_of({"text_config": {"max_position_embeddings": 64}, "max_position_embeddings": 1}) == 64
    assert context_of({}) is None

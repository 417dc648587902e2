"""What is refused before a server is started, and what is not."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.vllm.launch import main
from engine.vllm.server.hub_cache import cached_file
from engine.vllm.server.servable import complaint_about_model, complaint_about_parallelism, refusal_of

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
        (["--prefill-context-parallel-size", "2"], "context parallelism"),
        (["-dcp", "4"], "context parallelism"),
        (["--data-parallel-size=2"], "`prfaas node --ranks 2 ... -- --data-parallel-size 2`"),
        (["--data-parallel-size=2"], "`prfaas node ... -- --data-parallel-size 2` has all in one server"),
        (
            ["-dp", "8", "-dpl", "4", "--data-parallel-start-rank", "4"],
            "`prfaas node --ranks 4 --first-rank 4 ... -- --data-parallel-size 8 --data-parallel-address HOST "
            "--data-parallel-rpc-port PORT`",
        ),
        (["-dp", "8", "--data_parallel_hybrid_lb"], "--ranks 8"),
    ],
)
def test_flags_that_cannot_be_followed(flags: list[str], words: str) -> None:
    assert words in (complaint_about_parallelism(flags) or "")


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--pipeline-parallel-size", "2"],
        ["--data-parallel-size"],
        ["--tensor-parallel-size", "8"],
        ["--data-parallel-size", "2", "--data-parallel-rank", "1"],
        ["-dpn=0", "-dp=16"],
    ],
)
def test_flags_that_can(flags: list[str]) -> None:
    assert complaint_about_parallelism(flags) is None


def test_a_server_of_several_nodes_has_as_many_engines() -> None:
    assert complaint_about_parallelism(["-dp", "4"], nodes=4) is None
    assert "a node has one engine" in (complaint_about_parallelism(["-dp", "4"], nodes=2) or "")
    assert complaint_about_parallelism(["-dp", "1"]) is None


def test_a_directory_is_looked_into(tmp_path: Path) -> None:
    assert complaint_about_model(str(tmp_path), [], {}) is None
    (tmp_path / "config.json").write_text("{")
    assert "cannot be read" in (complaint_about_model(str(tmp_path), [], {}) or "")
    (tmp_path / "config.json").write_text("[]")
    assert "no JSON object" in (complaint_about_model(str(tmp_path), [], {}) or "")


OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def hub(tmp_path: Path) -> dict[str, str]:
    """A cache in which the main branch of a repository is a model that can be served, and an older commit one that cannot."""
    repository = tmp_path / "hub" / "models--org--name"
    for commit, config in ((NEW, HYBRID), (OLD, {"model_type": "mamba", "architectures": ["MambaForCausalLM"]})):
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps(config))
    for reference, commit in (("main", NEW), ("refs/pr/1", OLD)):
        path = repository / "refs" / reference
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(commit)
    return {"HF_HOME": str(tmp_path)}


@pytest.mark.parametrize(
    ("flags", "is_refused"),
    [
        ([], False),
        (["--revision", NEW], False),
        (["--revision", OLD], True),
        ([f"--revision={OLD}"], True),
        (["--revision", NEW, "--revision", OLD], True),
        (["--revision", "refs/pr/1"], True),
        (["--revision", "c" * 40], False),  # not downloaded: its first end tells
    ],
)
def test_a_name_is_looked_up_in_the_cache_at_its_revision(
    hub: dict[str, str], flags: list[str], is_refused: bool
) -> None:
    complaint = complaint_about_model("org/name", flags, hub)
    assert ("no attention layer" in (complaint or "")) == is_refused


def test_a_cache_in_disorder_is_for_vllm_to_judge(hub: dict[str, str]) -> None:
    assert complaint_about_model("x" * 5000, [], hub) is None, "no path, and no file's name"
    reference = next(Path(hub["HF_HOME"]).rglob("refs/main"))
    reference.write_bytes(b"\xff\xfe")
    assert complaint_about_model("org/name", [], hub) is None


def test_a_name_that_was_never_downloaded_is_nothing_to_judge(hub: dict[str, str], tmp_path: Path) -> None:
    assert complaint_about_model("org/other", ["--revision", OLD], hub) is None
    assert complaint_about_model("org/name", ["--revision", OLD], {"HF_HUB_CACHE": str(tmp_path / "none")}) is None
    assert complaint_about_model("org/name", ["--revision", OLD], hub | {"VLLM_USE_MODELSCOPE": "True"}) is None


@pytest.mark.parametrize("revision", ["main", OLD, NEW, "refs/pr/1", "c" * 40])
def test_the_cache_is_read_as_huggingface_hub_reads_it(hub: dict[str, str], revision: str) -> None:
    theirs = pytest.importorskip("huggingface_hub").try_to_load_from_cache
    cache = str(Path(hub["HF_HOME"]) / "hub")
    found = cached_file("org/name", revision, "config.json", hub)
    assert (str(found) if found else None) == theirs("org/name", "config.json", cache_dir=cache, revision=revision)


@pytest.mark.parametrize(
    "environment",
    [
        {"HF_HUB_CACHE": "{}/hub", "HF_HOME": "/nowhere"},
        {"HUGGINGFACE_HUB_CACHE": "{}/hub", "HF_HOME": "/nowhere"},
        {"HF_HOME": "{}", "XDG_CACHE_HOME": "/nowhere"},
    ],
)
def test_the_cache_is_where_its_variables_say(hub: dict[str, str], environment: dict[str, str]) -> None:
    place = {key: value.format(hub["HF_HOME"]) for key, value in environment.items()}
    assert cached_file("org/name", "", "config.json", place) is not None


def test_nothing_is_started_for_a_name_in_the_cache(
    hub: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", f"{hub['HF_HOME']}/hub")
    assert main(["--model", "org/name", "--agent-socket", "s", "--", "--revision", OLD]) == 2
    assert capsys.readouterr().err.startswith("engine: cannot serve: MambaForCausalLM has no attention layer")


def test_nothing_is_started_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}))
    arguments = ["--model", str(tmp_path), "--agent-socket", str(tmp_path / "s")]
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("engine: cannot serve: MambaForCausalLM has no attention layer")

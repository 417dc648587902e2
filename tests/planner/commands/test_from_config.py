"""`prfaas-plan profile from-config`: from a model's file and a benchmark's result to a profile that a site can use."""

import json

import pytest

from planner.commands.cli import main
from planner.model.profile import load_profile
from tests.planner.commands.inputs import CONFIGS
from tests.planner.profiles import models
from tests.planner.profiles.results import LENGTHS, SWEEP, vllm


@pytest.fixture
def made(tmp_path, capsys):
    """Runs it on a model and on results; (exit status, what is printed, what stderr says, where the profile is)."""

    def make(model, *options, results=SWEEP, output="profile.json"):
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(model))
        (tmp_path / "result.json").write_text(json.dumps(results))
        given = ["--benchmark", str(tmp_path / "result.json")] if results else []
        path = tmp_path / output
        argv = ["profile", "from-config", str(folder / "config.json"), *given, *map(str, options), "-o", str(path)]
        code = main(argv)
        out = capsys.readouterr()
        return code, out.out, out.err, path

    return make


def test_a_profile_with_all_its_parts(made, capsys):
    code, out, err, path = made(models.LLAMA3_70B, "--gpu", "H100")
    assert (code, err) == (0, "")
    profile = load_profile(path)
    assert profile.kv_size().bytes_per_token == 327_680
    assert profile.prefill_on("h100x8").points == tuple((tokens, ms / 1000) for tokens, ms in LENGTHS)
    assert profile.decode_on("h100x8").max_running == 58
    memory = profile.memory["h100x8"]
    assert memory.kv_bytes == pytest.approx(8 * 81_559 * 2**20 * 0.9 - 141.1e9, rel=1e-3)  # as nvidia-smi says
    assert memory.requests_of(profile.kv_size()(32_000)) == 45
    for said in (
        "S_kv (exact): derived",
        "T_prefill h100x8 (±3.0%): measured",
        "decode h100x8 (±",
        "memory h100x8 (±1.0%)",
    ):
        assert said in out
    for action in ("show", "check"):
        assert main(["profile", action, str(path)]) == 0
        assert "T_prefill h100x8 (±3.0%): measured: time to the first token" in capsys.readouterr().out


def test_a_site_is_solved_with_two_such_profiles(made, tmp_path, capsys):
    _, _, _, path = made(models.QWEN3_235B, "--gpu", "H200")
    slower = [vllm(prompt=n, ttft_ms=3 * t) for n, t in LENGTHS] + SWEEP[4:]
    code, *_ = made(models.QWEN3_235B, "--gpu", "H20", "--add-to", path, results=slower, output="both.json")
    assert code == 0
    assert set(load_profile(tmp_path / "both.json").prefill) == {"h200x8", "h20x8"}
    site = tmp_path / "site.toml"
    shipped = (
        (CONFIGS / "case_study.toml").read_text().replace("profiles/internal-1t.json", str(tmp_path / "both.json"))
    )
    site.write_text(shipped)
    assert main(["solve", "-c", str(site), "--extrapolate", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lambda_max_req_per_s"] > 0


def test_sizes_alone(made):
    code, out, err, path = made(models.KIMI_LINEAR_48B, results=None)
    assert (code, "no times: give --benchmark" in err, "S_kv (± not known)" in out) == (0, True, True)
    assert "states in float32 (assumed; --state-dtype says otherwise)" in out
    assert load_profile(path).prefill == {}
    code, out, _, _ = made(models.KIMI_LINEAR_48B, "--state-dtype", "float32", results=None)
    assert "S_kv (exact)" in out


def test_an_index_beside_the_weights_knows_best(made, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 141_107_412_992}})
    )
    _, out, _, path = made(models.LLAMA3_70B, "--gpu", "H100", "--gpus", 4)
    assert load_profile(path).memory["h100x4"].weights_bytes == 141_107_412_992
    assert "memory h100x4 (exact): derived: weights as their index says" in out


def test_an_unknown_model_by_hand(made):
    unknown = {"model_type": "mystery"}
    code, _, err, _ = made(unknown, "--gpu", "H100")
    assert (code, "an unknown family" in err, "--kv-bytes-per-token" in err) == (2, True, True)
    by_hand = ("--kv-bytes-per-token", 17_280, "--state-bytes", 182_373_581, "--weights-gb", 400)
    code, _, err, path = made(unknown, *by_hand, "--gpu", "H100", "--max-running", 20)
    assert (code, err) == (0, "")
    profile = load_profile(path)
    assert profile.kv_size()(1024) / 2**20 == pytest.approx(190.8, abs=0.05)
    assert profile.decode_on("h100x8").max_running == 20


@pytest.mark.parametrize(
    ("model", "options", "results", "said"),
    [
        (models.LLAMA3_70B, ["--gpu", "L20"], SWEEP, "is less than the 0.145 s that 8 × L20 takes at its peak"),
        (models.LLAMA3_70B, ["--gpu", "H100", "--gpus", "1"], SWEEP, "weights_bytes=1.411e+11: 141 GB of weights leave no room"),
        (models.LLAMA3_70B, ["--gpu", "TPU"], SWEEP, "--gpu TPU: not known; known are A100"),
        (models.LLAMA3_70B, [], SWEEP, "--gpu: missing; times belong to some hardware"),
        (models.LLAMA3_70B, ["--gpu", "H100", "--kv-copies", "0.5"], SWEEP, "kv_copies = 0.5: must be a number, 1 to"),
        (models.LLAMA3_70B, ["--gpu", "H100"], [vllm(running=8)], "--max-concurrency 1"),
        (
            models.LLAMA3_70B, ["--gpu", "H100"],
            [*SWEEP, vllm(prompt=30_000, running=64, step_ms=60, ttft_ms=90_000, completed=640)],
            None,
        ),
        (
            models.LLAMA3_70B, ["--gpu", "H100"],
            [*SWEEP, vllm(prompt=60_000, running=64, step_ms=600, ttft_ms=9_000, completed=640)],
            "decode: 60 requests at once with 60,100 tokens each (result.json, [6]) need",
        ),
        ({}, ["--gpu", "H100"], SWEEP, "missing: model_type"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(made, model, options, results, said):
    code, _, err, path = made(model, *options, results=results)
    if said is None:
        assert code == 0
        return
    assert (code, said in err, path.exists()) == (2, True, False)
    assert err.startswith("error: ")


def test_profiles_of_different_models_are_not_joined(made):
    _, _, _, path = made(models.LLAMA3_70B, "--gpu", "H100")
    code, _, err, _ = made(models.QWEN3_235B, "--gpu", "H200", "--add-to", path, output="both.json")
    assert (code, "kv.bytes_per_token = 327680 there and 192512 in this one: profiles of different models" in err) == (
        2,
        True,
    )


def test_a_folder_and_a_gpu_by_hand(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(models.DEEPSEEK_V3))
    assert main(["profile", "from-config", str(tmp_path), "--gpu", "X9", "--gpu-memory-gb", "200", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kv"]["bytes_per_token"] == 70_272
    assert found["memory"]["x9x8"]["kv_copies"] == 8  # tensor parallelism cannot divide a latent
    assert "--kv-copies 1 where engines split requests instead" in found["memory"]["x9x8"]["provenance"]
    assert main(["profile", "from-config", str(tmp_path / "nothing.json")]) == 2
    assert "no such file: give the config.json" in capsys.readouterr().err


def test_error_and_memory_are_checked_when_a_profile_is_read(tmp_path, capsys):
    path = tmp_path / "p.json"
    for spoiled, said in (
        ({"kv": {"bytes_per_token": 5, "error": -1}}, "error = -1"),
        (
            {"memory": {"x": {"gpus": 8, "hbm_bytes_per_gpu": 80e9, "weights_bytes": 1e12}}},
            "1,000 GB of weights leave no room",
        ),
        ({"memory": {"x": {"gpus": 0, "hbm_bytes_per_gpu": 80e9, "weights_bytes": 1}}}, "gpus = 0"),
        ({"decode": {"x": {"max_running": 5, "step_s": 0.1, "error": float("nan")}}}, "error = NaN"),
    ):
        path.write_text(json.dumps({"schema": 1, "model": "m"} | spoiled))
        assert main(["profile", "check", str(path)]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("model", [models.GEMMA3_27B, models.GPT_OSS_120B], ids=["gemma3", "gpt_oss"])
def test_windows_are_written_and_read_again(made, capsys, model):
    code, _, err, path = made(model, "--gpu", "H100", results=None)
    assert (code, "error" in err) == (0, False)
    assert len(load_profile(path).kv_size().windows) == 1
    assert main(["profile", "show", str(path)]) == 0  # though it has no times
    assert "requests of 8,000" in capsys.readouterr().out


def test_tensor_parallelism_copies_keys_and_values_not_states(made):
    _, _, _, path = made(models.QWEN3_NEXT_80B, "--gpu", "H100", results=None)
    profile = load_profile(path)
    kv, memory = profile.kv_size(), profile.memory["h100x8"]
    assert memory.kv_copies == 4
    each = kv.fixed_bytes + 4 * (kv(8_000) - kv.fixed_bytes)
    assert memory.requests_of(kv(8_000), kv.fixed_bytes) == int(memory.kv_bytes / each)


def test_batches_that_fit_with_one_copy_are_not_refused(made):
    """DeepSeek-V3 on 8 H200: 250 requests of 8,200 tokens are 144 GB once, and more than there is eight times."""
    fast = [vllm(prompt=n, ttft_ms=t) for n, t in LENGTHS]
    many = vllm(prompt=8_000, running=260, ttft_ms=100, step_ms=50, output=401, completed=2_600)
    code, _, err, _ = made(models.DEEPSEEK_V3, "--gpu", "H200", results=[*fast, many])
    assert (code, err) == (0, "")
    code, _, err, _ = made(models.DEEPSEEK_V3, "--gpu", "H200", "--kv-copies", 8, results=[*fast, many])
    assert (code, "GB of KVCache, and beside the weights" in err) == (2, True)


def test_weights_by_hand_tell_how_fast_they_can_be(made, tmp_path):
    """A prefill faster than 16-bit arithmetic is possible with weights of 8 bits, whatever their quantisation is called."""
    model = models.LLAMA3_70B | {"quantization_config": {"quant_method": "secret"}}
    fast = [vllm(prompt=n, ttft_ms=n * 0.025) for n in (1_000, 8_000)]  # the least in 16 bits is 0.0173 ms a token on 8
    assert made(model, "--gpu", "H100", "--gpus", 4, "--weights-gb", 71, results=fast)[0] == 0
    code, _, err, _ = made(models.LLAMA3_70B, "--gpu", "H100", "--gpus", 4, results=fast)
    assert (code, "at its peak of 3.96 PFLOP/s" in err) == (2, True)
    index = tmp_path / "model/model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 71_000_000_000}}))
    assert made(model, "--gpu", "H100", "--gpus", 4, results=fast)[0] == 0


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ({"kv": 5}, "[kv] = 5: must be a table"),
        ({"kv": {"bytes_per_token": "x"}}, "bytes_per_token = 'x'"),
        ({"prefill": []}, "[prefill] = []"),
        (
            {"kv": {"bytes_per_token": 36_864, "windows": [{"window_tokens": 9, "bytes_per_token": 36_864}]}},
            "--add-to: kv.windows = ",
        ),
    ],
)  # fmt: skip
def test_what_is_added_to_is_checked(made, tmp_path, there, said):
    added = tmp_path / "there.json"
    added.write_text(json.dumps({"schema": 1, "model": "m"} | there))
    code, _, err, _ = made(models.GPT_OSS_120B, "--add-to", added, results=None)
    assert code == 2
    assert said in err


def test_a_profile_of_times_alone_gets_its_sizes(made, tmp_path):
    added = tmp_path / "there.json"
    curve = {"points": [[1000, 0.1], [8000, 0.8]], "valid_tokens": [1000, 8000], "provenance": "measured: x"}
    added.write_text(json.dumps({"schema": 1, "model": "m", "prefill": {"x": curve}}))
    code, _, _, path = made(models.LLAMA3_70B, "--add-to", added, results=None)
    assert (code, load_profile(path).kv_size().bytes_per_token) == (0, 327_680)

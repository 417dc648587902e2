"""Tokens of a prefill server and a decode server against those of one server alone: SGLang itself, on a CPU, with a tiny model.

Requests go to both servers with one room, as SGLang's router and its mini load balancer send them.
"""

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from node.engine.shm_cleanup import remove, shared_by
from node.process.children import kill_group
from tests.sglang.agents import ANSWER_S, Agent
from tests.sglang.serving import kernels_stood_in
from tests.transport.path.ports import free_ports

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),  # what its import warns of is not ours to mend
]

START_S = 240.0
VOCABULARY, LAYERS, HIDDEN, INNER, HEADS, KV_HEADS = 256, 3, 64, 128, 4, 2
CHUNK = 128
ARGUMENTS = (
    f"--device cpu --attention-backend torch_native --sampling-backend pytorch --grammar-backend none --skip-tokenizer-init"
    f" --max-total-tokens 4096 --max-running-requests 8 --context-length 1024 --chunked-prefill-size {CHUNK}"
    f" --disable-cuda-graph --disable-overlap-schedule --skip-server-warmup --mem-fraction-static 0.05 --host 127.0.0.1"
).split()
DECODE = ("--disaggregation-mode", "decode", "--disaggregation-decode-retraction-backup", "cpu_tensor")
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def write_model(folder: Path) -> None:
    """A Llama whose weights are drawn by chance."""
    from safetensors.torch import save_file

    chance = torch.Generator().manual_seed(0)
    head = HIDDEN // HEADS
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KV_HEADS * head, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * head, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
    }  # fmt: skip
    weights = {
        f"model.layers.{layer}.{name}.weight": 0.15 * torch.randn(shape, generator=chance)
        for layer in range(LAYERS)
        for name, shape in shapes.items()
    }
    weights["model.embed_tokens.weight"] = torch.randn((VOCABULARY, HIDDEN), generator=chance)
    weights["lm_head.weight"] = 0.15 * torch.randn((VOCABULARY, HIDDEN), generator=chance)
    norms = [f"model.layers.{layer}.{at}_layernorm" for layer in range(LAYERS) for at in ("input", "post_attention")]
    weights |= {f"{name}.weight": torch.ones(HIDDEN) for name in (*norms, "model.norm")}
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))


class Server:
    """A server in processes of its own, in a group that ends with it."""

    def __init__(self, folder: Path, name: str, port: int, *arguments: str, **environment: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / f"{name}.log"
        with kernels_stood_in(), self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sglang.launch_server", *ARGUMENTS, "--port", str(port), *arguments],
                env=os.environ | {"HF_HUB_OFFLINE": "1", "SGLANG_HOST_IP": "127.0.0.1"} | environment,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def wait(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{self.url}/model_info", timeout=ANSWER_S).ok:
                    return
            time.sleep(0.2)
        raise AssertionError(f"{self.url} does not serve:\n{self.log.read_text()[-4000:]}")

    def generate(self, prompt: list[int], num_tokens: int, **extra: Any) -> Any:
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True},
            "return_logprob": True,
        }
        return requests.post(f"{self.url}/generate", json=body | extra, timeout=ANSWER_S).json()

    def close(self) -> None:
        leavings = shared_by(self.process.pid)
        kill_group(self.process.pid)
        self.process.wait(ANSWER_S)
        remove(leavings)


class Pair:
    """A prefill and a decode server, each with an agent, and one server alone."""

    def __init__(self, folder: Path, page: int) -> None:
        model = folder / "model"
        model.mkdir()
        write_model(model)
        self._bootstrap, *ports = free_ports(4)
        self.agents = [Agent("prefill", folder, role="prefill"), Agent("decode", folder)]
        prefill, decode = self.agents
        common = ("--model-path", str(model), "--page-size", str(page))
        ours = (
            *common,
            "--disaggregation-transfer-backend",
            "prfaas",
            "--disaggregation-bootstrap-port",
            str(self._bootstrap),
        )
        self.prefill = Server(
            folder, "prefill", ports[0], *ours, "--disaggregation-mode", "prefill",
            PRFAAS_AGENT_SOCKET=str(prefill.socket),
        )  # fmt: skip
        self.decode = Server(
            folder, "decode", ports[1], *ours, *DECODE,
            PRFAAS_AGENT_SOCKET=str(decode.socket), PRFAAS_AGENT_CONTROL=decode.control,
        )  # fmt: skip
        self.alone = Server(folder, "alone", ports[2], *common)
        self._rooms = iter(range(1 << 40, 1 << 41))

    def generate(self, prompt: list[int], num_tokens: int) -> Any:
        """As a router does: to both at once; the answer is that of decode."""
        room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self._bootstrap, "bootstrap_room": next(self._rooms)}
        with ThreadPoolExecutor(1) as beside:
            prefill = beside.submit(self.prefill.generate, prompt, num_tokens, **room)
            answer = self.decode.generate(prompt, num_tokens, **room)
            prefill.result()
        return answer

    def close(self) -> None:
        for each in (self.prefill, self.decode, self.alone, *self.agents):
            each.close()


@pytest.fixture(scope="module", params=[1, 16])
def pair(request, tmp_path_factory) -> Iterator[Pair]:
    whole = Pair(tmp_path_factory.mktemp("s"), request.param)
    try:
        for server in (whole.prefill, whole.decode, whole.alone):
            server.wait()
        yield whole
    finally:
        whole.close()


def prompts(*lengths: int) -> list[list[int]]:
    chance = random.Random(7)
    return [[chance.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("length", [1, 15, 16, 17, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_tokens_and_their_probabilities_are_those_of_one_server(pair, length):
    (prompt,) = prompts(length)
    alone, together = pair.alone.generate(prompt, 12), pair.generate(prompt, 12)
    assert len(alone["output_ids"]) == 12
    assert together["output_ids"] == alone["output_ids"]
    # The first is the prefill server's word, which travels beside the pages.
    one, other = (answer["meta_info"]["output_token_logprobs"] for answer in (alone, together))
    assert [token for _, token, _ in one] == [token for _, token, _ in other]
    assert other[0][0] == pytest.approx(one[0][0], abs=1e-3)


def test_requests_at_once_get_their_own_tokens(pair):
    asked = prompts(*range(5, 300, 40))
    expected = [pair.alone.generate(prompt, 8)["output_ids"] for prompt in asked]
    with ThreadPoolExecutor(4) as clients:
        answers = list(clients.map(lambda prompt: pair.generate(prompt, 8), asked))
    assert [answer.get("output_ids") for answer in answers] == expected


def test_a_prompt_that_prefill_has_cached_is_handed_over_whole(pair):
    (prompt,) = prompts(200)
    expected = pair.alone.generate(prompt, 8)["output_ids"]
    assert [pair.generate(prompt, 8)["output_ids"] for _ in range(2)] == [expected] * 2


def test_a_dead_agent_is_an_error_and_no_silence(pair):
    """The last test of its pair of servers."""
    pair.agents[1].kill()
    answer = pair.generate(prompts(40)[0], 4)
    assert answer["object"] == "error"
    assert "unavailable" in answer["message"] or "agent_gone" in answer["message"]

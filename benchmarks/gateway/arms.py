"""The gateways that benchmarks.gateway compares, each a process before mock engines: ours, vllm-router, Dynamo, a bare proxy."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib import peers
from benchmarks.lib.processes import GreetingChild

ENDS_SOURCE = Path(__file__).with_name("http_ends.c")
# DeepSeek's own template has more cases; these are the tokens that it puts around messages.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<｜Assistant｜>{{ m.content }}<｜end▁of▁sentence｜>"
    "{% else %}<｜User｜>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
MARKS = ("<｜User｜>", "<｜Assistant｜>")
START_S = 60.0
CHECKOUT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class GatewayArm:
    """A gateway that answers on `port`; `pid` and its children are what is measured."""

    name: str
    port: int
    pid: int

    @property
    def is_ours(self) -> bool:
        return self.name.startswith(("ours", "before"))

    def cpu_s(self) -> float:
        """CPU seconds that the threads of the process and of its children have taken so far."""
        return _cpu_ns(self.pid) * 1e-9


def _cpu_ns(pid: int) -> int:
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
        total += sum(_cpu_ns(int(child)) for child in (task / "children").read_text().split())
    return total


Start = Callable[[ExitStack, str, list[str], Path], GatewayArm]


def built_ends(directory: Path) -> Path:
    """The C program that is engine and client."""
    program = directory / "http_ends"
    subprocess.run(["gcc", "-O2", "-o", str(program), str(ENDS_SOURCE)], check=True)
    return program


@contextmanager
def arms(names: list[str], ends: Path, directory: Path, before: Path | None) -> Iterator[list[GatewayArm]]:
    """The gateways of these names, ready; `before` is the checkout that `before` and `before_pd` run from."""
    starts = STARTS | {
        name.replace("ours", "before"): _ours(roles, before or CHECKOUT) for name, roles in ROLES.items()
    }
    with ExitStack() as stack:
        engines = [_started(stack, [str(ends), "engine"]) for _ in range(2)]
        urls = [f"http://127.0.0.1:{engine.greeting['port']}" for engine in engines]
        yield [starts[name](stack, name, urls, directory / name) for name in names]


def _ours(roles: tuple[str, str], checkout: Path, more: str = "", *, marked: bool = False) -> Start:
    def start(stack: ExitStack, name: str, urls: list[str], directory: Path) -> GatewayArm:
        nodes = [f"{role}={url}" for role, url in zip(roles, urls, strict=True)]
        agents = _started(stack, [sys.executable, "-m", "benchmarks.gateway.agents", *nodes])
        _write_model(directory, marked=marked)
        return _started_ours(stack, name, agents.greeting["addresses"], directory, checkout, more)

    return start


def _write_model(directory: Path, *, marked: bool) -> None:
    """A model's tokenizer and template. `marked`: like ChatML's and Llama 3's its marks are special tokens, and the template ends
    in a line's end. Only there, between a special token and more text, does Dynamo's cache of tokens part a prompt, and
    DeepSeek's marks are no special tokens."""
    directory.mkdir()
    template = TEMPLATE
    if marked:
        template = template.replace("<｜Assistant｜>", "<｜Assistant｜>{{ '\\n' }}")
        tokenizer = json.loads(peers.tokenizer().read_text())
        for token in tokenizer["added_tokens"]:
            if token["content"] in MARKS:
                token |= {"special": True, "normalized": False}
        (directory / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    else:
        shutil.copy(peers.tokenizer(), directory / "tokenizer.json")
    settings = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def _started_ours(
    stack: ExitStack, name: str, agents: list[str], directory: Path, checkout: Path, more: str
) -> GatewayArm:
    port = _free_port()
    nodes = "".join(f'[[gateway.nodes]]\nagent = "{agent}"\n' for agent in agents)
    (directory / "gateway.toml").write_text(f'[gateway]\nport = {port}\ntokenizer_dir = "."\n{more}{nodes}')
    argv = [sys.executable, "-m", "gateway", "-c", str(directory / "gateway.toml")]
    return _listening(stack, name, port, argv, directory, checkout)


def _vllm_router(stack: ExitStack, name: str, urls: list[str], directory: Path) -> GatewayArm:
    return _router(stack, name, ["--worker-urls", *urls], directory)


def _vllm_router_pd(stack: ExitStack, name: str, urls: list[str], directory: Path) -> GatewayArm:
    prefill, decode = urls
    return _router(stack, name, ["--vllm-pd-disaggregation", "--prefill", prefill, "--decode", decode], directory)


def _router(stack: ExitStack, name: str, workers: list[str], directory: Path) -> GatewayArm:
    directory.mkdir()
    port = _free_port()
    options = ["--policy", "cache_aware", "--port", str(port), "--prometheus-port", str(_free_port())]
    argv = [str(peers.ROUTER_PYTHON.with_name("vllm-router")), *workers, *options]
    return _listening(stack, name, port, argv, directory)


def _dynamo(*options: str, marked: bool = False) -> Start:
    """Dynamo's frontend, choosing workers by what it sent them (its workers here tell it of no blocks), as vllm-router does."""

    def start(stack: ExitStack, name: str, urls: list[str], directory: Path) -> GatewayArm:
        _write_model(directory, marked=marked)
        (directory / "config.json").write_text(json.dumps(DYNAMO_MODEL))
        known = directory / "known"
        known.mkdir()
        environment = os.environ | {"PYTHONPATH": str(CHECKOUT), "DYN_FILE_KV": str(known)}
        python = str(peers.DYNAMO_PYTHON)
        for _ in urls:
            argv = [python, "-m", "benchmarks.gateway.dynamo_worker", str(directory)]
            stack.callback(GreetingChild(argv, environment | {"DYN_LOG": "error"}, quiet=True).close)
        port = _free_port()
        argv = [python, "-m", "dynamo.frontend", *DYNAMO_OPTIONS, "--http-port", str(port), *options]
        return _listening(stack, name, port, argv, directory, more=environment)

    return start


def _bare_proxy(stack: ExitStack, name: str, urls: list[str], directory: Path) -> GatewayArm:
    proxy = _started(stack, [sys.executable, "-m", "benchmarks.gateway.bare_proxy", *urls])
    return GatewayArm(name, proxy.greeting["port"], proxy.pid)


DYNAMO_OPTIONS = [
    *("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq", "--http-host", "127.0.0.1"),
    *("--router-mode", "kv", "--no-router-kv-events"),
]
DYNAMO_MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 10_000_000,
    "vocab_size": 129_280,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
ROLES = {"ours": ("decode", "decode"), "ours_pd": ("prefill", "decode")}
STARTS: dict[str, Start] = {
    **{name: _ours(roles, CHECKOUT) for name, roles in ROLES.items()},
    "ours_workers": _ours(ROLES["ours"], CHECKOUT, "workers = 2\n"),
    "ours_unkept": _ours(ROLES["ours"], CHECKOUT, "kept_answer_bytes = 0\n"),  # no stream is continued elsewhere
    "ours_marked": _ours(ROLES["ours"], CHECKOUT, marked=True),
    "aiohttp": _bare_proxy,
    "vllm_router": _vllm_router,
    "vllm_router_pd": _vllm_router_pd,
    "dynamo": _dynamo(),
    "dynamo_fastokens": _dynamo("--tokenizer", "fastokens"),
    "dynamo_marked": _dynamo(marked=True),
}


def _started(stack: ExitStack, argv: list[str]) -> GreetingChild:
    end = GreetingChild(argv)
    stack.callback(end.close)
    return end


def _listening(
    stack: ExitStack,
    name: str,
    port: int,
    argv: list[str],
    directory: Path,
    checkout: Path = CHECKOUT,
    more: dict[str, str] | None = None,
) -> GatewayArm:
    """A gateway once it answers a request; what it says goes to a file, as it would in production."""
    environment = os.environ | {"PYTHONPATH": str(checkout)} | (more or {})
    log = stack.enter_context((directory / "log").open("w"))
    process = stack.enter_context(subprocess.Popen(argv, stdout=log, stderr=log, env=environment, cwd=checkout))
    stack.callback(process.terminate)
    deadline = time.monotonic() + START_S
    while not _answers(port):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{name} did not start:\n{(directory / 'log').read_text()[-2000:]}")
        time.sleep(0.2)
    return GatewayArm(name, port, process.pid)


def _answers(port: int) -> bool:
    body = b'{"model":"mock","messages":[{"role":"user","content":"Hello"}],"max_tokens":1}'
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])

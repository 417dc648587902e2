"""The cost of our connector for a decode step of vLLM without transfers.

    .venv-vllm/bin/python -m benchmarks.vllm.step [--json] [--model llama | DIRECTORY] [--running 16] [--steps 50] [--rounds 20]

Four vLLM engines make --steps decode steps of --running requests in turns: without a connector; with one that does
nothing (vLLM's own cost for any connector); with one that only asks for our layout of KVCache; and with ours. Seconds
are processor time of the whole process; per cents compare with the engine without. `hooks` is the time of our
connector's methods in a step. It is measured on the model's thread in steps of its own, after the others, because
timing costs, too. No agent answers.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from operator import truediv
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 100
MAX_MODEL_LEN = 8192
WARM_UP_STEPS = 20
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # scheduler and worker in the process itself
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


CONNECTORS = {
    "bare": None,
    "idle": ("IdleConnector", "benchmarks.vllm.idle_connector"),
    "layout": ("HeadsFirstConnector", "benchmarks.vllm.idle_connector"),
    "ours": ("PrfaasConnector", "engine.vllm.connector"),
}


class EngineArm:
    """An engine in a process of its own, which steps when it is told to."""

    def __init__(self, name: str, model: Path, running: int, scratch: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.vllm.step", "--model", str(model), "--running", str(running)]
        self._log = (scratch / f"{name}.log").open("w")
        self._process = subprocess.Popen(
            [*command, "--arm", name, "--socket", str(scratch / "nobody.sock")],
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def wait_ready(self) -> None:
        """Raises RuntimeError with the end of its log if it does not come up."""
        self._answer()

    def steps(self, count: int, *, hooks: bool = False) -> float:
        """Seconds of processor time per step, or with `hooks` of the connector's methods in one."""
        assert self._process.stdin is not None
        print(json.dumps([count, hooks]), file=self._process.stdin, flush=True)
        return float(self._answer()) / count

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # vLLM writes there as well
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise RuntimeError(f"vLLM ended:\n{Path(self._log.name).read_text()[-4000:]}")


def measure(arms: dict[str, EngineArm], steps: int, rounds: int) -> dict[str, float]:
    """Medians over rounds: milliseconds of a step, and what each connector adds, in per cent of a step of the same round."""
    spent: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds):
        for name in list(arms)[:: 1 if number % 2 else -1]:
            spent[name].append(arms[name].steps(steps))
    # In the end: every step makes the next one longer, so arms are compared at equal lengths of context only.
    hooks = [arms["ours"].steps(steps, hooks=True) for _ in range(rounds)]
    bare = spent["bare"]
    result = {f"{name}_step_ms": statistics.median(seconds) * 1e3 for name, seconds in spent.items()}
    for name in ("idle", "layout", "ours"):
        result[f"{name}_percent"] = 100 * (statistics.median(map(truediv, spent[name], bare)) - 1)
    result["ours_over_idle_percent"] = 100 * (statistics.median(map(truediv, spent["ours"], spent["idle"])) - 1)
    result["hooks_us"] = statistics.median(hooks) * 1e6
    result["hooks_percent"] = 100 * statistics.median(hooks) / bare[-1]
    return result


def serve(name: str, model: Path, running: int, socket: str) -> None:
    """An arm: answers each line of input with seconds."""
    import vllm
    from vllm.config import KVTransferConfig

    options: dict[str, Any] = {}
    if (connector := CONNECTORS[name]) is not None:
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector=connector[0],
            kv_connector_module_path=connector[1],
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"agent_socket": socket, "http_url": "http://127.0.0.1:1"},
        )
    llm = vllm.LLM(
        model=str(model), dtype="float32", enforce_eager=True, disable_log_stats=True, max_model_len=MAX_MODEL_LEN,
        max_num_seqs=running, num_gpu_blocks_override=4096, disable_hybrid_kv_cache_manager=False, **options,
    )  # fmt: skip
    engine = llm.llm_engine
    sampling = vllm.SamplingParams(
        temperature=0.0, max_tokens=MAX_MODEL_LEN - PROMPT_TOKENS - 1, ignore_eos=True, detokenize=False
    )
    for number in range(running):
        prompt = [4 + (number * 31 + i * 7) % 500 for i in range(PROMPT_TOKENS)]
        engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
    for _ in range(WARM_UP_STEPS + running):
        engine.step()
    print("answer null", flush=True)
    for line in sys.stdin:
        count, hooks = json.loads(line)
        print(f"answer {_hook_seconds(engine, count) if hooks else _seconds(engine, count)}", flush=True)


def _seconds(engine: Any, count: int) -> float:
    started_s = time.process_time()
    for _ in range(count):
        engine.step()
    return time.process_time() - started_s


def _hook_seconds(engine: Any, count: int) -> float:
    """Of all methods of the connector's two sides, as vLLM calls them."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    spent: list[float] = []
    sides = (engine.engine_core.engine_core.scheduler.connector, get_kv_transfer_group())
    names = [name for name, what in vars(KVConnectorBase_V1).items() if callable(what) and not name.startswith("_")]
    for side in sides:
        for name in names:
            setattr(side, name, _timed(getattr(side, name), spent))
    try:
        for _ in range(count):
            engine.step()
    finally:
        for side in sides:
            for name in names:
                delattr(side, name)
    return sum(spent)


def _timed(method: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        started_s = time.thread_time()
        try:
            return method(*args, **kwargs)
        finally:
            spent.append(time.thread_time() - started_s)

    return timed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", default="llama")
    parser.add_argument("--running", type=int, default=16)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--arm", choices=CONNECTORS, help=argparse.SUPPRESS)
    parser.add_argument("--socket", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        serve(options.arm, Path(options.model), options.running, options.socket)
        return 0
    from engine.torch.tiny import ARCHITECTURES, build_model

    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        model = Path(options.model)
        if options.model in ARCHITECTURES:
            model = build_model(options.model, scratch / "model", report=lambda line: None).path
        arms = {name: EngineArm(name, model, options.running, scratch) for name in CONNECTORS}
        try:
            for arm in arms.values():
                arm.wait_ready()
            result = measure(arms, options.steps, options.rounds)
        finally:
            for arm in arms.values():
                arm.close()
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        print(", ".join(f"{name} {value:.2f}" for name, value in result.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

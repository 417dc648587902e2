"""Part C: our pair beside a plain server and beside the NixlConnector, in turn, same model and flags."""

import asyncio
import contextlib
import json
import os
import signal
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import aiohttp

from benchmarks.vllm.pd import HOME, ServerProcess, without
from engine.vllm.launch import VllmOptions, environment, server_command
from gateway.cluster.served_model import salt_of
from hybrid_cache.layout.layout import ModelLayout
from tests.e2e.harness import Bench
from tests.gpu.answers import TimedAnswer, compared, missed, timed
from tests.gpu.rounds import Found
from tests.gpu.settings import NAME, Setting
from tests.transport.path.ports import free_port

POLL_S: Final = 0.2
OURS: Final = ("--kv-transfer-config", "--kv-events-config", "--middleware", "--scheduler-cls")
REMOTE_DECODE: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass
class TimedRows:
    """What was measured at one length."""

    ours: list[TimedAnswer] = field(default_factory=list)
    plain: list[TimedAnswer] = field(default_factory=list)
    prefills_s: list[float] = field(
        default_factory=list
    )  # of our prefill server, asked by itself, which saves meanwhile
    overlaps: list[float] = field(default_factory=list)
    fallbacks: set[str] = field(default_factory=set)

    def figures(self, length: int) -> dict[str, Any]:
        row: dict[str, Any] = {"tokens": length, **compared(self.ours, self.plain)}
        row["prefill"] = round(row["plain_ttft_s"] / statistics.median(self.prefills_s), 4)
        return row | {"overlap": statistics.median(self.overlaps), "fallbacks": sorted(self.fallbacks)}


class PlainServer:
    """A server of the same model and flags with another connector, or none."""

    def __init__(
        self, model: Path, setting: Setting, folder: Path, name: str, *extra: str, env: dict[str, str] | None = None
    ) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        options = VllmOptions(
            model=str(model), served_name=NAME, host="127.0.0.1", port=port, agent_socket=folder / "unused.sock",
            threads=1, drain_timeout_s=1.0, chunk_tokens=setting.chunk_tokens, max_model_len=setting.max_model_len,
            vllm_flags=setting.flags_for(model.name, timed=True),
        )  # fmt: skip
        argv = [*without(server_command(options, is_cpu=setting.is_dry), *OURS), *extra]
        env = environment(options, os.environ, is_cpu=setting.is_dry) | (env or {})
        self._server = ServerProcess([sys.executable, *argv], folder / f"{name}.log", env, talks=False)

    async def ready(self, session: aiohttp.ClientSession) -> None:
        """Raises RuntimeError when it ends before."""
        while True:
            self._server.raise_if_ended()
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{self.url}/health") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(POLL_S)

    def signal(self, number: signal.Signals) -> None:
        self._server.signal(number)

    def stop(self) -> None:
        self._server.stop()


def nixl_lacks() -> str:
    """Why there is no pair with the NixlConnector; empty where there may be one."""
    found = find_spec("nixl") is not None or HOME.exists()
    return "" if found else "the package nixl is not installed"


def nixl_server(model: Path, setting: Setting, folder: Path, name: str) -> PlainServer:
    """One of a pair. KVCache goes by UCX, on a GPU from memory to memory of the device."""
    transfer: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    if setting.is_dry:
        transfer["kv_buffer_device"] = "cpu"
    env = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "UCX_TLS": "tcp" if setting.is_dry else "cuda_ipc,cuda_copy,tcp",
    }
    if find_spec("nixl") is None:
        env["PYTHONPATH"] = os.pathsep.join([str(HOME), os.environ.get("PYTHONPATH", "")])
    return PlainServer(model, setting, folder, name, "--kv-transfer-config", json.dumps(transfer), env=env)


@contextlib.contextmanager
def beside(model: Path, setting: Setting, folder: Path) -> Iterator[tuple[PlainServer, list[PlainServer]]]:
    """A plain server, and two with the NixlConnector if there is one. They load while our pair does."""
    with contextlib.ExitStack() as stack:
        plain = PlainServer(model, setting, folder, "plain")
        stack.callback(plain.stop)
        pair = []
        for name in () if nixl_lacks() else ("nixl-prefill", "nixl-decode"):
            pair.append(nixl_server(model, setting, folder, name))
            stack.callback(pair[-1].stop)
        yield plain, pair


async def times(bench: Bench, setting: Setting, plain: PlainServer, pair: Sequence[PlainServer]) -> Found:
    await plain.ready(bench.session)
    nixl: dict[str, Any] = {"left_out": nixl_lacks()}
    if pair:
        nixl = await _nixl_is_ready(bench, setting, pair)
    for server in pair:
        server.signal(signal.SIGSTOP)  # its threads poll
    rows, reasons = [], list[str]()
    for length in setting.timed_lengths:
        row = (await _measured(bench, setting, plain.url, length)).figures(length)
        rows.append(row)
        reasons += [f"{length} tokens: fallbacks {row['fallbacks']}"] if row["fallbacks"] else []
        if not setting.is_dry:
            reasons += missed(row, is_longest=length == max(setting.timed_lengths))
    for server in pair:
        server.signal(signal.SIGCONT)
    if pair and not nixl["left_out"]:
        nixl["prompts"] = [await _nixl_row(bench, setting, pair, length) for length in setting.timed_lengths]
    return reasons, {"prompts": rows, "nixl": nixl}


async def _measured(bench: Bench, setting: Setting, plain: str, length: int) -> TimedRows:
    description = await bench.describe("far")
    salt = salt_of(ModelLayout.from_json(description.layout_json)).hex()
    rows = TimedRows()
    for number in range(-1, setting.rounds):  # the first opens connections and compiles, and does not count
        prompts = [bench.prompt(length, seed=5000 + 100 * length + 10 * number + each) for each in range(3)]
        name = bench.name()
        answer = await timed(bench.session, bench.system.api_url, prompts[0], setting.timed_tokens, name)
        reference = await timed(bench.session, plain, prompts[1], setting.timed_tokens)
        params = {"salt": salt}
        prefill = await timed(bench.session, description.engine_url, prompts[2], 1, kv_transfer_params=params)
        record = await bench.record(name)
        rows.fallbacks |= set(record["fallbacks"])
        if number >= 0:
            rows.ours.append(answer)
            rows.plain.append(reference)
            rows.prefills_s.append(prefill.ttft_s)
            rows.overlaps.append(record["overlap"] or 0.0)
    return rows


async def _nixl_is_ready(bench: Bench, setting: Setting, pair: Sequence[PlainServer]) -> dict[str, Any]:
    """Figures beside ours: where it does not start, ours stand alone."""
    try:
        async with asyncio.timeout(setting.start_s):
            for server in pair:
                await server.ready(bench.session)
    except (RuntimeError, TimeoutError) as error:
        return {"left_out": f"{type(error).__name__}: {str(error)[-500:]}"}
    return {"left_out": ""}


async def _nixl_row(bench: Bench, setting: Setting, pair: Sequence[PlainServer], length: int) -> dict[str, Any]:
    ttfts_s, intervals_s = list[float](), list[float]()
    for number in range(-1, setting.rounds):
        prompt = bench.prompt(length, seed=9000 + 100 * length + number)
        try:
            ttft_s, answer = await _by_nixl(bench.session, [server.url for server in pair], prompt, setting)
        except (RuntimeError, aiohttp.ClientError, TimeoutError, KeyError) as error:
            return {"tokens": length, "failed": f"{type(error).__name__}: {str(error)[-300:]}"}
        if number >= 0:
            ttfts_s.append(ttft_s)
            intervals_s += answer.intervals_s
    found = {"tokens": length, "ttft_s": round(statistics.median(ttfts_s), 5)}
    return found | ({"itl_p50_s": round(statistics.median(intervals_s), 5)} if intervals_s else {})


async def _by_nixl(
    session: aiohttp.ClientSession, urls: Sequence[str], prompt: Sequence[int], setting: Setting
) -> tuple[float, TimedAnswer]:
    """As its proxies do: the prefill server first, then its answer's parameters to the decode server."""
    body = {"model": NAME, "prompt": list(prompt), "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    async with session.post(f"{urls[0]}/v1/completions", json=body | {"kv_transfer_params": REMOTE_DECODE}) as answer:
        answer.raise_for_status()
        params = (await answer.json())["kv_transfer_params"]
    prefilled_s = loop.time() - began_s
    found = await timed(session, urls[1], prompt, setting.timed_tokens, kv_transfer_params=params)
    return prefilled_s + found.ttft_s, found

"""Starts the engine process, watches it, starts it again when it dies, and ends it with the node."""

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

from node.config import ENGINES_OF_ONE_ROLE, SERVERS, NodeConfig
from node.engine.shm_cleanup import remove, shared_by
from node.engine.start_failure import MOST_BYTES, Cause, cause_in
from node.process.children import Child, kill_group
from node.process.log_rotation import start_log
from node.process.ports import NODE_VARIABLE
from node.process.restarts import FIRST_BACKOFF_S, Restarts
from transport.control.python_command import python_module

log = logging.getLogger(__name__)

CANNOT_START = -1
NO_DOMAIN = "none.invalid"  # to vLLM an empty list means every domain (RFC 6761: no name ends so)
STARTING_STOP_S = 2.0
CONTROL_VARIABLE = "PRFAAS_AGENT_CONTROL"  # for an engine that reserves at its own agent
SEAT_VARIABLE = "PRFAAS_ENGINE_SEAT"  # in a server that nodes share (engine.vllm.server.seats): PATH:RANK:COUNT
EngineCommand = Callable[[NodeConfig, Path], list[str]]


def engine_command(config: NodeConfig, socket_path: Path) -> list[str]:
    """The command line of this node's engine."""
    model = ["--emulate", config.model] if config.engine == "emulated" else ["--model", config.model]
    module = f"engine.{config.engine}.launch" if config.engine in SERVERS else "engine"
    command = [*python_module(module), *model]
    port = config.inner_engine_port()
    command += ["--host", port.host, "--port", str(port.number), "--agent-socket", str(socket_path)]
    command += ["--model-name", config.model_name]
    if config.engine != "vllm" or config.chunk_tokens is not None:
        command += ["--chunk-tokens", str(config.prefill_chunk_tokens)]
    command += ["--threads", str(config.threads), "--drain-timeout-s", str(config.drain_timeout_s)]
    if config.model_revision and config.engine != "emulated":
        command += ["--model-revision", config.model_revision]
    if config.block_size:
        command += ["--block-size", str(config.block_size)]
    if config.max_model_len:
        command += ["--max-model-len", str(config.max_model_len)]
    if config.engine != "vllm" and config.stages > 1:
        command += ["--stages", str(config.stages)]
    if config.engine in ENGINES_OF_ONE_ROLE:
        command += ["--role", config.role, "--bootstrap-port", str(config.bootstrap_port)]
    if config.engine in SERVERS:
        command.append("--")  # what follows is the server's own
        if config.stages > 1:
            command += ["--pipeline-parallel-size", str(config.stages)]
        if config.engine == "vllm":
            command += ["--allowed-media-domains", *(config.allowed_media_domains or [NO_DOMAIN])]
    return [*command, *config.engine_args]


def engine_environment(config: NodeConfig, inherited: Mapping[str, str], control: str = "") -> dict[str, str]:
    """The environment of this node's engine; what the operator has set wins, but for where its agent's `control` service is.

    A model that is a directory needs no network. vLLM may be given a name instead, and downloads what it stands for.
    """
    defaults = {"OMP_NUM_THREADS": str(config.threads), "PYTHONUNBUFFERED": "1"}
    if config.engine != "vllm" or Path(config.model).is_dir():
        defaults |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    ours = {NODE_VARIABLE: config.node_id}
    if config.engine in ENGINES_OF_ONE_ROLE:
        ours[CONTROL_VARIABLE] = control
    return {**defaults, **inherited, **ours}


def shares_server(environment: Mapping[str, str]) -> bool:
    """Whether other nodes have their engines in the same server: what rank 0 starts is all of it, what others start none."""
    return SEAT_VARIABLE in environment


class EngineSupervisor:
    """One engine process at a time, started again until it fails too often."""

    def __init__(
        self,
        config: NodeConfig,
        socket_path: Path,
        log_path: Path,
        now: Callable[[], float],
        on_state: Callable[[], None],
        *,
        command: EngineCommand = engine_command,
        first_backoff_s: float = FIRST_BACKOFF_S,
    ) -> None:
        self._config = config
        self._command = command
        self._socket_path = socket_path
        self._log_path = log_path
        self._now = now
        self._on_state = on_state
        self._deaths = Restarts(config.engine_max_restarts, first_backoff_s=first_backoff_s)
        self._process: Child | None = None
        self.control = ""  # address of the agent's control service, once it listens
        self.on_death: Callable[[], None] = lambda: None  # of one that nothing outside has ended
        self.started_at = now()
        self.restarts = 0
        self.refusal = ""  # why no start of this engine can succeed
        self._cause: Cause | None = None  # of its last end
        self._has_served = False
        self._serves = False  # this start of it
        self._is_ended_for_others = False
        self._is_counted = False  # the death that it has been ended for
        self._given_up = asyncio.Event()
        self._leavings: set[Path] = set()  # of this start

    @property
    def pid(self) -> int | None:
        """The running engine's process id."""
        return self._process.pid if self._process and self._process.returncode is None else None

    def leader_of(self, engine: int) -> Callable[[], int | None]:
        """What an engine's processes descend from, where `engine` is the one that said Hello."""
        return (lambda: engine) if shares_server(os.environ) else (lambda: self.pid)

    @property
    def gave_up(self) -> bool:
        """Whether no engine will be started any more."""
        return self._given_up.is_set()

    async def given_up(self) -> None:
        """Returns once no engine will be started any more."""
        await self._given_up.wait()

    def engine_serves(self) -> None:
        """The engine takes requests."""
        self._has_served = self._serves = True
        self._note_leavings()
        self._deaths.on_ready()

    async def run(self) -> None:
        """Keeps an engine running until cancelled or until it died too often (`node.process.restarts`)."""
        while True:
            await self._live_and_die()
            if self._is_counted:
                self._on_state()
                await asyncio.sleep(self._deaths.on_kill(self._now()))
                self.restarts += 1
                continue
            if not self._is_ended_for_others:
                self.on_death()
            pause_s = self._deaths.on_death(self._now())
            self.refusal = "" if self._is_ended_for_others else self._reason()
            if pause_s is None or self.refusal:
                log.error(
                    "engine given up node=%s after %d deaths%s",
                    self._config.node_id,
                    self._deaths.deaths,
                    self.refusal and f": {self.refusal}",
                )
                self._given_up.set()
                self._on_state()
                return
            self._on_state()
            await asyncio.sleep(pause_s)
            self.restarts += 1

    def _reason(self) -> str:
        """Why another start would end as the last one did; "" if it might not: an engine that has served can be served."""
        if self._has_served:
            return ""
        try:
            with self._log_path.open("rb") as file:
                before, self._cause = self._cause, cause_in(file.read(MOST_BYTES).decode(errors="replace"))
        except OSError:
            return ""
        if self._cause is None or not (self._cause.is_final or self._cause == before):
            return ""
        return self._cause.reason

    async def _live_and_die(self) -> None:
        self.started_at, self._serves = self._now(), False
        self._is_ended_for_others = self._is_counted = False
        try:
            returncode = await self._run_once()
        except OSError as exc:  # no memory for a process, no room for its log: may pass
            log.error("engine not started node=%s: %s", self._config.node_id, exc)
            returncode = CANNOT_START
        log.error(
            "engine exited node=%s status=%s after=%.1fs log=%s",
            self._config.node_id,
            returncode,
            self._now() - self.started_at,
            self._log_path,
        )

    async def _run_once(self) -> int:
        with start_log(self._log_path) as out:
            self._process = Child(
                self._command(self._config, self._socket_path),
                output=out,
                environment=engine_environment(self._config, os.environ, self.control),
                orphaned_by=signal.SIGKILL,  # its pages are of no use any more, and its port is wanted
            )
        try:
            return await self._process.wait()
        finally:
            if self._process.returncode is not None:
                self._kill_group()
                self._remove_leavings()

    def kill(self) -> None:
        """SIGKILL; `run` starts the next one."""
        if self._process and self._process.returncode is None:
            self._kill_group()

    def start_anew(self, is_counted: bool) -> None:
        """Ends an engine that has lost those it computes with; `run` starts the next one. Each of them counts that death of their
        group. `is_counted`: this one's last engine has ended of it, too. One that has not been started again needs no end."""
        if self.pid is not None:
            log.warning("engine ended node=%s: another rank's has ended, and all start together", self._config.node_id)
            self._is_ended_for_others, self._is_counted = True, is_counted
            self.kill()

    def _kill_group(self) -> None:
        """The engine and what it started: workers that outlive their server would hold its pages and its memory."""
        assert self._process is not None
        self._note_leavings()
        kill_group(self._process.pid)

    def _note_leavings(self) -> None:
        if self._config.engine == "sglang" and self._process is not None:
            self._leavings |= shared_by(self._process.pid)

    def _remove_leavings(self) -> None:
        leavings, self._leavings = self._leavings, set()
        remove(leavings)

    async def stop(self, timeout_s: float) -> None:
        """SIGTERM (running streams finish), SIGKILL after `timeout_s`. Call after `run` was cancelled."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            # One that only starts has nothing to end in order, and vLLM does not hear of it while it waits for its processes.
            async with asyncio.timeout(timeout_s if self._serves else min(timeout_s, STARTING_STOP_S)):
                await process.wait()
        except TimeoutError:
            log.error("engine killed node=%s: it did not end within %.1fs", self._config.node_id, timeout_s)
            self.kill()
            await process.wait()
        self._kill_group()
        self._remove_leavings()

"""Several engines from one node's file: a node for each, started and ended as one.

    prfaas node -c FILE --ranks 2           big-0: ports of the file, first half of the GPUs, data parallel rank 0
                                            big-1: each port one higher, second half, rank 1

An agent has one engine, and a landing lies in the memory of one: so each engine is a node, which gateways choose by name.

    prfaas node -c FILE -- --data-parallel-size 2      the same nodes; their engines are in one server

The launches of these engines meet (`engine.vllm.server.seats`).
"""

import argparse
import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, takewhile
from math import prod
from pathlib import Path
from typing import Final

from engine.vllm.server.seats import MEETING_PLACE, SEAT_VARIABLE, Seat
from engine.vllm.server.servable import complaint_about_parallelism
from node.agent import ENGINE_STOP_S
from node.config import SERVERS, THIS_MACHINE, NodeConfig
from node.process.children import ending_with_us
from node.process.owned_names import OwnedDirectory
from node.process.ports import ListenPort
from prfaas.errors import StartRefused
from prfaas.system.rank_lines import RankLines
from transport.control.python_command import python_module
from transport.path.tcp import lasting_port

MOST_RANKS: Final = 64  # on one machine
RANK_FLAGS: Final = ("--ranks", "--first-rank")
NUMBER: Final = "{rank}"  # in the names of files that each rank has one of
OWN_FILES: Final = ("certificate", "key")
LAST_PORT: Final = 65535
EVERYWHERE: Final = frozenset({"0.0.0.0", "::"})  # hosts of listeners at every address
ADVERTISED: Final = ("control_advertise", "transfer_advertise")
DEVICES: Final = "CUDA_VISIBLE_DEVICES"
VISIBLE: Final = (DEVICES, "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")  # vLLM refuses the second one if it differs
NO_DEVICE: Final = "-1"  # CUDA sees none of those that follow
SIZE: Final = ("--data-parallel-size", "-dp")
RANK: Final = ("--data-parallel-rank", "-dpn")
ADDRESS: Final = ("--data-parallel-address", "-dpa")
RPC_PORT: Final = ("--data-parallel-rpc-port", "-dpp")
TENSOR_PARALLEL: Final = ("--tensor-parallel-size", "-tp", "--tp-size", "--tp")
STAGES: Final = ("--pipeline-parallel-size", "-pp", "--pp-size")
# Flags for several engines behind one address, or of all ranks at once: each with what says it here.
ELSEWHERE: Final = {
    ("--data-parallel-size-local", "-dpl"): "--ranks says how many run on this machine",
    ("--data-parallel-start-rank", "-dpr"): "--first-rank says which is the first of this machine",
    ("--data-parallel-hybrid-lb", "-dph"): "gateways balance the ranks",
    ("--data-parallel-multi-port-external-lb", "-dpm"): "--ranks gives each a port",
    ("--headless",): "each rank has a server of its own",
    ("--device-ids",): f"each rank has devices of its own: set {DEVICES} to those of all",
}
EXTERNAL: Final = ("--data-parallel-external-lb", "-dpe")
BACKEND: Final = ("--data-parallel-backend", "-dpb")
LOCAL: Final = ("--data-parallel-size-local", "-dpl")
# Flags that are not for all ranks in one server, with one process that takes their requests: each with why.
NOT_IN_ONE: Final = {
    ("--data-parallel-start-rank", "-dpr"): "all ranks of this server run here: see --ranks and --first-rank",
    ("--data-parallel-hybrid-lb", "-dph"): "gateways balance the ranks",
    ("--data-parallel-multi-port-external-lb", "-dpm"): "--ranks N has a server for each rank",
    ("--headless",): "a node's server takes its requests",
    ("--api-server-count", "-asc"): "one process takes the requests of all ranks; --ranks N has a server for each",
    ("--enable-elastic-ep",): "each rank is a node, and their number stays as it is",
    ("--nnodes", "-n"): "all ranks of this server run here: see --ranks and --first-rank",
}
MARGIN_S: Final = 30.0  # beyond what a node takes to drain and to end its engine
EXIT_FAILED: Final = 1


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's node: how its command line and its environment differ from those of the others."""

    node_id: str
    flags: tuple[str, ...]
    engine_flags: tuple[str, ...]
    environment: Mapping[str, str]
    is_of_group: bool = False  # its engine cannot go on without those of the other ranks
    shares_server: bool = False  # which is that of all ranks

    def command(self, own: Sequence[str], engine_args: Sequence[str]) -> list[str]:
        """The command of its process, where `own` and `engine_args` were given for all of them."""
        return [*python_module("prfaas"), *_of_each(own), *self.flags, "--", *engine_args, *self.engine_flags]


def _of_each(own: Sequence[str]) -> list[str]:
    """What of a command line holds for each rank: one that were told of ranks would start ranks of its own, without end."""
    parser = argparse.ArgumentParser(add_help=False)
    for flag in RANK_FLAGS:
        parser.add_argument(flag)
    return parser.parse_known_args(own)[1]


def plans_of(
    config: NodeConfig,
    count: int | None,
    first: int | None,
    environment: Mapping[str, str],
    free_port: Callable[[], int] = lambda: lasting_port(THIS_MACHINE),
) -> list[RankPlan]:
    """The nodes that a command line stands for, where it is more than itself. Raises StartRefused.

    `count` and `first` are None where it does not say: one of a group that has a machine for each rank is told `--ranks 1`.
    """
    together = ranks_in_one_server(config, environment)
    if (count or 1) > 1 or first is not None or (count is not None and together):
        return rank_plans(config, count or 1, first or 0, environment, free_port)
    return plans_of_one_server(config, together) if together else []


def rank_plans(
    config: NodeConfig, count: int, first: int, environment: Mapping[str, str], free_port: Callable[[], int]
) -> list[RankPlan]:
    """A node for each of `count` ranks, the first of them number `first`. Raises StartRefused."""
    _check_own_files(config)
    _check_ports(config, count)
    engine_flags = _data_parallel_flags(config.engine_args, count, first, free_port)
    size = _value(config.engine_args, SIZE)
    # An engine that dies takes with it those of other machines, which only what started them all can start again.
    shared = ("--engine-max-restarts", "0") if size is not None and int(size) > count else ()
    devices = _devices(config, environment, count)
    return [
        RankPlan(
            f"{config.node_id}-{first + at}",
            (*_flags(config, at, first + at), *shared),
            engine_flags[at],
            {name: parts[at] for name, parts in devices.items()},
            is_of_group=size is not None,
        )
        for at in range(count)
    ]


def ranks_in_one_server(config: NodeConfig, environment: Mapping[str, str]) -> int:
    """How many engines vLLM is to have in one server, as its own flags say; 0: one, or what `environment` has started."""
    size, rank = _value(config.engine_args, SIZE), _value(config.engine_args, RANK)
    is_apart = rank is not None or _value(config.engine_args, EXTERNAL) is not None
    if config.engine != "vllm" or is_apart or SEAT_VARIABLE in environment or size is None or not size.isdecimal():
        return 0
    return int(size) if int(size) > 1 else 0


def plans_of_one_server(config: NodeConfig, count: int) -> list[RankPlan]:
    """A node for each of `count` ranks, whose engines are in one server. Raises StartRefused."""
    for names, why in NOT_IN_ONE.items():
        if _value(config.engine_args, names) is not None:
            raise StartRefused(f"{names[0]}: not with {SIZE[0]} {count} in one server: {why}")
    if (backend := _value(config.engine_args, BACKEND)) not in (None, "mp"):
        raise StartRefused(
            f"{BACKEND[0]} {backend}: not with {SIZE[0]} {count} in one server: its ranks are processes here"
        )
    if _value(config.engine_args, LOCAL) not in (None, str(count)):
        raise StartRefused(str(complaint_about_parallelism(config.engine_args)))
    if count > MOST_RANKS:
        raise StartRefused(f"{SIZE[0]} {count}: a machine has {MOST_RANKS} ranks at most")
    _check_own_files(config)
    _check_ports(config, count)
    return [
        RankPlan(f"{config.node_id}-{at}", (*_flags(config, at, at),), (), {}, is_of_group=True, shares_server=True)
        for at in range(count)
    ]


def _check_own_files(config: NodeConfig) -> None:
    for name in OWN_FILES:
        if (path := getattr(config, name)) and NUMBER not in path:
            raise StartRefused(
                f"{name} = {path!r}: each rank needs one of its own; write {NUMBER} where its number stands"
            )


def _check_ports(config: NodeConfig, count: int) -> None:
    """Each rank's ports are one higher: two of a host that lie nearer together than there are ranks would meet."""
    listeners = [config.port(name) for name in config.listeners]
    listeners.append(ListenPort("bootstrap_port", config.port("engine").host, config.bootstrap_port))
    given = sorted((each.number, each.key, each.host) for each in listeners if each.number)
    for port, key, _ in given:
        if port + count - 1 > LAST_PORT:
            raise StartRefused(f"{key} = {port}: {count} ranks need ports up to {port + count - 1}")
    for (lower, key, host), (port, other, other_host) in combinations(given, 2):
        if port - lower < count and (host == other_host or not EVERYWHERE.isdisjoint((host, other_host))):
            raise StartRefused(f"{other} = {port} lies less than {count} above {key} = {lower}: ranks would meet there")


def _flags(config: NodeConfig, at: int, number: int) -> list[str]:
    """What tells the rank's node from others of the file."""
    flags = ["--node-id", f"{config.node_id}-{number}"]
    for key in (*(f"{listener}_port" for listener in config.listeners), "bootstrap_port"):
        if port := getattr(config, key):
            flags += [_flag(key), str(port + at)]
    for key in ADVERTISED:
        host, _, port = getattr(config, key).rpartition(":")
        if host and port.isdecimal() and (":" not in host or host.endswith("]")):
            flags += [_flag(key), f"{host}:{int(port) + at}"]
    for key in OWN_FILES:
        if path := getattr(config, key):
            flags += [_flag(key), path.replace(NUMBER, str(number))]
    return flags


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _data_parallel_flags(
    engine_args: Sequence[str], count: int, first: int, free_port: Callable[[], int]
) -> list[tuple[str, ...]]:
    """vLLM's flags of each rank, where its ranks are one group: a mixture of experts. Others know nothing of each other."""
    for names, instead in ELSEWHERE.items():
        if _value(engine_args, names) is not None:
            raise StartRefused(f"{names[0]}: leave it out with --ranks: {instead}")
    if _value(engine_args, RANK) is not None:
        raise StartRefused(f"{RANK[0]}: with --ranks each node gets the number of its own")
    size = _value(engine_args, SIZE)
    if size is None:
        return [()] * count
    if not size.isdecimal() or int(size) < first + count:
        raise StartRefused(f"{SIZE[0]} {size}: --ranks {count} and --first-rank {first} need at least {first + count}")
    group: list[str] = []
    is_whole = int(size) == count
    for names, value in ((ADDRESS, THIS_MACHINE), (RPC_PORT, "")):
        if _value(engine_args, names) is None:
            if not is_whole:
                raise StartRefused(
                    f"{names[0]}: needed, as {int(size) - count} of {size} ranks run elsewhere: "
                    f"{names[0]} {'HOST, where rank 0 runs' if names is ADDRESS else 'PORT, the same for all of them'}"
                )
            group += [names[0], value or str(free_port())]
    return [(*group, RANK[0], str(first + at)) for at in range(count)]


def _value(flags: Sequence[str], names: Sequence[str]) -> str | None:
    """What is said last of a flag; None if nothing is."""
    found = None
    for index, flag in enumerate(flags):
        name, has_value, value = flag.partition("=")
        if (name.replace("_", "-") if name.startswith("--") else name) in names:
            found = value if has_value else flags[index + 1] if index + 1 < len(flags) else ""
    return found


def _devices(config: NodeConfig, environment: Mapping[str, str], count: int) -> dict[str, list[str]]:
    """By the variables that say so, the devices of each rank: equal parts of the visible ones. Empty where no server asks.

    A server takes the first ones that it sees: each would take those of rank 0, unless it sees its own alone.
    """
    needed = _devices_of_engine(config)
    given = {name: environment[name] for name in VISIBLE if name in environment}
    if not given and needed:
        return {DEVICES: [",".join(map(str, range(at * needed, (at + 1) * needed))) for at in range(count)]}
    parts = {name: _parts(name, visible, needed, count) for name, visible in given.items()}
    return {name: each for name, each in parts.items() if each}


def _parts(name: str, visible: str, needed: int, count: int) -> list[str]:
    devices = [each for each in takewhile(lambda each: each.strip() != NO_DEVICE, visible.split(",")) if each]
    if not devices:
        return []
    each, rest = divmod(len(devices), count)
    if rest:
        raise StartRefused(f"{name} = {visible!r}: {len(devices)} devices are no equal parts for {count} ranks")
    if each < needed:
        raise StartRefused(f"{name} = {visible!r}: {each} for each of {count} ranks, whose engine needs {needed}")
    return [",".join(devices[at * each : (at + 1) * each]) for at in range(count)]


def _devices_of_engine(config: NodeConfig) -> int:
    """How many one engine takes, 0 where it takes none: a rank of its tensors and stages each."""
    if config.engine not in SERVERS:
        return 0
    sizes = [_value(config.engine_args, TENSOR_PARALLEL), _value(config.engine_args, STAGES) or str(config.stages)]
    return prod(int(size) for size in sizes if size and size.isdecimal())


async def run_ranks(
    plans: Sequence[RankPlan], commands: Sequence[Sequence[str]], drain_s: float, say: Callable[[str], None]
) -> int:
    """Runs a process for each rank until all have ended; returns an exit status.

    Signals go to all of them: SIGTERM drains and ends them, a second one ends what still runs, SIGHUP has them read their
    file again. Where one ends by itself, the others are told to end, too: what started us starts all of them again.
    Engines of one group end and start together.
    """
    with RankLines(len(plans) if any(plan.is_of_group for plan in plans) else 0) as lines, _seats(plans) as seats:
        return await _run(plans, commands, drain_s, say, lines, seats)


@contextlib.contextmanager
def _seats(plans: Sequence[RankPlan]) -> Iterator[list[dict[str, str]]]:
    """What each rank's environment has of a server that they share."""
    if not any(plan.shares_server for plan in plans):
        yield [{} for _ in plans]
        return
    folder = OwnedDirectory(Path(tempfile.gettempdir()))
    try:
        place = folder.path / MEETING_PLACE
        yield [Seat(place, at, len(plans)).environment() for at in range(len(plans))]
    finally:
        folder.close()


async def _run(
    plans: Sequence[RankPlan],
    commands: Sequence[Sequence[str]],
    drain_s: float,
    say: Callable[[str], None],
    lines: RankLines,
    seats: Sequence[Mapping[str, str]],
) -> int:
    processes: dict[str, asyncio.subprocess.Process] = {}
    told = asyncio.Event()

    def send(number: signal.Signals) -> None:
        for process in processes.values():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)

    def end() -> None:
        told.set()
        send(signal.SIGTERM)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    loop.add_signal_handler(signal.SIGHUP, send, signal.SIGHUP)
    try:
        for at, (plan, command) in enumerate(zip(plans, commands, strict=True)):
            if told.is_set():
                lines.not_started(at)
                continue
            processes[plan.node_id] = await asyncio.create_subprocess_exec(
                *ending_with_us(command, signal.SIGTERM),
                stdin=asyncio.subprocess.DEVNULL,
                env={**os.environ, **plan.environment, **lines.environment(at), **seats[at]},
                start_new_session=True,
                pass_fds=lines.descriptors(at),
            )
            lines.started(at)
        waits = {name: asyncio.create_task(process.wait()) for name, process in processes.items()}
        telling = asyncio.create_task(told.wait())
        await asyncio.wait([*waits.values(), telling], return_when=asyncio.FIRST_COMPLETED)
        telling.cancel()
        if by_itself := not told.is_set():
            for name, task in waits.items():
                if task.done():
                    say(f"{name} ended with status {task.result()}: the other ranks are told to end")
            end()
        if waits:
            await _ended([*waits.values()], drain_s + ENGINE_STOP_S + MARGIN_S, send, say)
        return _status([task.result() for task in waits.values()], by_itself=by_itself)
    finally:
        send(signal.SIGTERM)


async def _ended(
    waits: Sequence["asyncio.Task[int]"],
    timeout_s: float,
    send: Callable[[signal.Signals], None],
    say: Callable[[str], None],
) -> None:
    _, late = await asyncio.wait(waits, timeout=timeout_s)
    if late:
        say(f"{len(late)} ranks are late: they are killed")
        send(signal.SIGKILL)
        await asyncio.wait(waits)


def _status(statuses: Sequence[int], *, by_itself: bool) -> int:
    """What a rank says that failed, else that one ended without being told. A SIGTERM ends one that is about to start."""
    own = (0 if status == -signal.SIGTERM else EXIT_FAILED if status < 0 else status for status in statuses)
    return max(own, default=0) or int(by_itself)

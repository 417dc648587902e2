"""The command line of `prfaas`: one parser, and one module of `prfaas.commands` for each command that needs one."""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console

import prfaas
from node.command_line import add_node_arguments, config_from, split_engine_args
from planner.commands.command_parser import CommandParser
from prfaas.commands.argument_types import within
from prfaas.commands.arguments import (
    add_convert,
    add_drain,
    add_explain,
    add_flows,
    add_nodes,
    add_reload,
    add_top,
    add_topology,
)
from prfaas.commands.descriptions import COMMANDS
from prfaas.commands.picking import add_epp
from prfaas.commands.preparing import STATE_DIR, add_preparations
from prfaas.ending import EXIT_FAILED, EXIT_INTERRUPTED, ended_by_signals, run_until_done
from prfaas.errors import (
    CertificateError,
    CheckError,
    ConversionError,
    InitError,
    KeyNameError,
    MembersError,
    PrfaasError,
    StartRefused,
    TopologyError,
)
from transport.control.grpc_environment import for_grpc

if TYPE_CHECKING:
    from node.config import NodeConfig
    from prfaas.system.ranks import RankPlan
    from prfaas.system.system import System
    from prfaas.system.topology import Topology

EXIT_NEEDS_RESTART = 3
EXIT_BAD_CONFIG = 2
WIDTH_WHEN_PIPED = 160
WRONG_INPUTS = (
    TopologyError, CertificateError, ConversionError, CheckError, InitError, KeyNameError, MembersError, StartRefused,
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status: 0 done, 1 failed, 2 bad configuration or arguments."""
    os.environ.update(for_grpc(os.environ))
    own, engine_args = split_engine_args(sys.argv[1:] if argv is None else argv)
    commands = parser()
    arguments = commands.parse_args(own)
    if engine_args and arguments.command != "node":
        commands.error("only `prfaas node` takes arguments for an engine after --")
    arguments.engine_args, arguments.own_args = engine_args, own
    try:
        status: int = arguments.run(arguments)
    except PrfaasError as exc:
        print(f"prfaas {arguments.command}: {exc}", file=sys.stderr)
        # Of `explain`, 1 says that the request would be refused.
        return EXIT_BAD_CONFIG if isinstance(exc, WRONG_INPUTS) or arguments.command == "explain" else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return status


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = CommandParser(
        prog="prfaas",
        description="Prefill-as-a-Service: long prefills run in another cluster.",
        epilog="Example: prfaas demo. Each command has its own --help; prfaas-plan plans capacity.",
    )
    top.add_argument("--version", action="version", version=f"prfaas {prfaas.__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", **COMMANDS["demo"].arguments())
    add_topology(demo)
    demo.add_argument(
        "--requests",
        type=within(1, 110),
        default=110,
        metavar="N",
        help="replay the first N of the trace's 110 requests (default: 110)",
    )
    demo.set_defaults(run=_demo)

    up = commands.add_parser("up", **COMMANDS["up"].arguments())
    add_topology(up)
    up.add_argument(
        "--port",
        type=within(0, 65535),
        metavar="PORT",
        help="port of the API, 0 for any free one (default: the file's)",
    )
    up.set_defaults(run=_up)

    gateway = commands.add_parser("gateway", **COMMANDS["gateway"].arguments())
    gateway.add_argument(
        "-c", "--config", required=True, metavar="FILE.toml", help="configuration with a [gateway] table"
    )
    gateway.add_argument(
        "--workers",
        type=within(1, 64),
        metavar="N",
        help="number of worker processes on the port (default: the file's)",
    )
    gateway.add_argument(
        "--replace",
        action="store_true",
        help="take the place of the gateway that runs with this file, once this one sees a ready node",
    )
    gateway.add_argument(
        "--ready-within",
        type=float,
        metavar="S",
        help="with --replace: give up if no node is ready by then (default: 60)",
    )
    _add_check(gateway)
    gateway.set_defaults(run=_gateway)

    node = commands.add_parser("node", **COMMANDS["node"].arguments())
    node.add_argument(
        "--ranks",
        type=within(1, 64),
        metavar="N",
        help="so many nodes, an engine each, started and ended as one: NODE-0 with the file's ports, NODE-1 with each one higher",
    )
    node.add_argument(
        "--first-rank",
        type=within(0, 65535),
        metavar="N",
        help="the number of the first of --ranks, where others of the group run elsewhere (default: 0)",
    )
    _add_check(node)
    add_node_arguments(node)
    node.set_defaults(run=_node)

    add_epp(commands).set_defaults(run=_epp)

    check = commands.add_parser("check", **COMMANDS["check"].arguments())
    check.add_argument(
        "-c", "--config", type=Path, default=STATE_DIR / "up" / "gateway.toml", metavar="FILE.toml",
        help="the gateway's file (default: the one of `prfaas up`, %(default)s)",
    )  # fmt: skip
    check.add_argument("--json", action="store_true", help="print the findings as JSON")
    check.set_defaults(run=_check)

    for name, (add_arguments, run) in ASKING.items():
        asking = commands.add_parser(name, **COMMANDS[name].arguments())
        add_arguments(asking)
        asking.set_defaults(run=run)

    add_preparations(commands)
    return top


def _add_check(command: argparse.ArgumentParser) -> None:
    command.add_argument("--check", action="store_true", help="only check the configuration, and exit")


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH_WHEN_PIPED)


def _demo(arguments: argparse.Namespace) -> int:
    with ended_by_signals():
        from prfaas.demo.demo import Demo
        from prfaas.system.models import ensure_model
        from prfaas.system.topology import DEFAULT_FILE, load_topology

        topology = load_topology(arguments.config or DEFAULT_FILE, arguments.state_dir)
        if topology.model.profile:
            raise TopologyError("[model]: profile: a demo compares answers with those of a real model; use `prfaas up`")
        console = _console()
        model_dir = ensure_model(topology.model, arguments.state_dir, console.print)
    # Any free port: a demo must not fail because something else listens on 8000.
    demo = Demo(topology.replace_gateway(port=0), model_dir, arguments.state_dir, arguments.requests, console)
    return run_until_done(
        demo.run(), on_signal=lambda: print("stopping: what was started is ended in order ...", flush=True)
    )


def _up(arguments: argparse.Namespace) -> int:
    say = _telling(_console())
    try:
        with ended_by_signals():
            import prfaas.system.system  # noqa: F401  # takes seconds, which a signal need not wait for
            from prfaas.system.models import ensure_model
            from prfaas.system.topology import DEFAULT_FILE, load_topology

            topology = load_topology(arguments.config or DEFAULT_FILE, arguments.state_dir)
            if arguments.port is not None:
                topology = topology.replace_gateway(port=arguments.port)
            ensure_model(topology.model, arguments.state_dir, say)
    except KeyboardInterrupt:
        return 0  # a signal is how it is meant to end
    status = run_until_done(_stay_up(topology, arguments.state_dir, say))
    return 0 if status == EXIT_INTERRUPTED else status


async def _stay_up(topology: "Topology", state_dir: Path, say: Callable[[str], None]) -> bool:
    from prfaas.system.system import System

    async with System(topology, state_dir / "up", say) as system:
        for line in _welcome(system):
            say(line)
        try:
            await system.watch()
        finally:
            say("stopping: running streams finish first ...")
    return False  # only a signal ends it well


def _telling(console: Console) -> Callable[[str], None]:
    """Prints lines as they are. A terminal that is gone must not keep us from ending what we started."""

    def say(line: str) -> None:
        with contextlib.suppress(OSError):
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    return say


def _welcome(system: "System") -> list[str]:
    model, url = system.topology.model.served_name, system.api_url
    lines = ["", f"API      {url}/v1   (model {model!r})", f"console  {url}/console", f"metrics  {url}/metrics"]
    if system.plan_url:
        lines.append(f"plan     prfaas-plan show --url {system.plan_url}")
    lines += [f"         {node.metrics_url}/metrics   ({name})" for name, node in system.nodes.items()]
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}], "max_tokens": 16}}'
    key = "-H 'authorization: Bearer KEY' " if system.topology.gateway.get("tenants") else ""
    noise = [] if system.topology.model.path else ["No trained model answers: expect noise, not language."]
    return [
        *lines,
        "",
        *noise,
        f"curl -s {url}/v1/chat/completions {key}-H 'content-type: application/json' -d '{body}'",
        "",
        "Ctrl-C ends it, running streams first; a second one ends them, too.",
    ]


def _gateway(arguments: argparse.Namespace) -> int:
    _hear_no_hang_up()
    from gateway.main import main as gateway_main

    workers = [] if arguments.workers is None else ["--workers", str(arguments.workers)]
    replace = ["--replace"] if arguments.replace else []
    within = [] if arguments.ready_within is None else ["--ready-within", str(arguments.ready_within)]
    check = ["--check"] if arguments.check else []
    return gateway_main(["-c", arguments.config, *workers, *replace, *within, *check])


def _epp(arguments: argparse.Namespace) -> int:
    from gateway.picker.main import config_from as picker_config
    from gateway.picker.main import run
    from transport.control.settings import SettingsError

    try:
        config = picker_config(arguments)
    except SettingsError as exc:
        print(f"prfaas epp: {exc}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    return run(config)


def _node(arguments: argparse.Namespace) -> int:
    _hear_no_hang_up()
    from node.errors import NodeConfigError
    from node.main import check_model, run
    from prfaas.system.ranks import plans_of

    try:
        config = config_from(arguments, arguments.engine_args)
        if plans := plans_of(config, arguments.ranks, arguments.first_rank, os.environ):
            return _ranks(arguments, config, plans)
        check_model(config)
    except NodeConfigError as exc:
        print(f"prfaas node: {exc}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    if arguments.check:
        return _checked(arguments)
    if config.cluster_kind == "prfaas":
        from prfaas_cluster.role import PRFAAS as role
    else:
        from pd_cluster.role import PD as role
    return run(config, role, lambda: config_from(arguments, arguments.engine_args))


def _ranks(arguments: argparse.Namespace, config: "NodeConfig", plans: "list[RankPlan]") -> int:
    from node.main import check_model
    from prfaas.system.ranks import run_ranks

    if arguments.check:
        for plan in plans:
            own = parser().parse_args([*arguments.own_args, *plan.flags])
            check_model(config_from(own, [*arguments.engine_args, *plan.engine_flags]))
        return _checked(arguments)
    commands = [plan.command(arguments.own_args, arguments.engine_args) for plan in plans]
    return asyncio.run(run_ranks(plans, commands, config.drain_timeout_s, _to_stderr))


def _checked(arguments: argparse.Namespace) -> int:
    print(f"{arguments.config or 'node'}: ok")
    return 0


def _to_stderr(line: str) -> None:
    print(f"prfaas node: {line}", file=sys.stderr, flush=True)


def _explain(arguments: argparse.Namespace) -> int:
    from prfaas.commands.asking import GatewayClient
    from prfaas.commands.explain import ExplainWish, ask, show

    wish = ExplainWish(
        file=arguments.file,
        prompt=arguments.prompt,
        tokens=arguments.tokens,
        model=arguments.model,
        endpoint=arguments.endpoint,
        tenant=arguments.tenant,
        headers=dict(arguments.header),
    )
    gateway = GatewayClient(arguments.url, authority=arguments.ca)
    with gateway.understood():
        found = ask(gateway, wish)
        if arguments.json:
            print(json.dumps(found))
        else:
            show(found, _console())
        return 0 if found["verdict"]["accepted"] else EXIT_FAILED


def _top(arguments: argparse.Namespace) -> int:
    from prfaas.commands.asking import GatewayClient
    from prfaas.commands.top import once, watch

    gateway, console = GatewayClient(arguments.url, authority=arguments.ca), _console()
    with gateway.understood():
        if arguments.json:
            print(json.dumps(gateway.get("/prfaas/console")))
        elif arguments.once or not console.is_terminal:
            console.print(once(gateway))
        else:
            watch(gateway, console, arguments.every)
    return 0


def _flows(arguments: argparse.Namespace) -> int:
    from prfaas.commands.asking import GatewayClient
    from prfaas.commands.flows import HEADER, FlowFilter, follow, line

    wanted = FlowFilter(all_of_them=arguments.all, link=arguments.link, kinds=frozenset(arguments.kind))
    gateway = GatewayClient(arguments.url, authority=arguments.ca)
    if not arguments.json:
        print(HEADER, flush=True)
    with gateway.understood():
        for flow in follow(gateway, wanted, once=arguments.once, tell=_warn):
            print(json.dumps(flow) if arguments.json else line(flow), flush=True)
    return 0


def _warn(line: str) -> None:
    """Beside what the command prints, which another program may read."""
    print(line, file=sys.stderr, flush=True)


def _drain_node(arguments: argparse.Namespace) -> int:
    from prfaas.commands.drain import DrainWish, drain_node

    wish = DrainWish(
        node=arguments.node, undo=arguments.undo, timeout_s=arguments.timeout, certificate=arguments.certificate
    )
    return run_until_done(drain_node(wish, arguments.config, _telling(_console())))


def _drain(arguments: argparse.Namespace) -> int:
    if arguments.node is not None:
        return _drain_node(arguments)
    from prfaas.commands.asking import GatewayClient

    source, destination = arguments.link
    wanted = {"source": source, "destination": destination, "drained": not arguments.undo}
    gateway = GatewayClient(arguments.url, authority=arguments.ca)
    with gateway.understood():
        found = gateway.post("/prfaas/links", json.dumps(wanted).encode())["data"]
        if arguments.json:
            print(json.dumps(found))
            return 0
        for each in found:
            state = "drained" if each["drained"] else "in use" if each["up"] else "down"
            print(f"{each['source']} → {each['destination']}: {state}")
    return 0


def _reload(arguments: argparse.Namespace) -> int:
    from prfaas.commands.asking import GatewayClient

    gateway = GatewayClient(arguments.url, authority=arguments.ca)
    with gateway.understood():
        found = (gateway.get("/prfaas/config") if arguments.dry_run else gateway.post("/prfaas/config", b""))["data"]
        stays = [each["key"] for each in found if each["needs_restart"]]
        if arguments.json:
            print(json.dumps(found))
            return EXIT_NEEDS_RESTART if stays else 0
        for each in found:
            note = "  (only a restart changes that)" if each["needs_restart"] else ""
            print(f"{each['key']}: {each['is_now']} → {each['will_be']}{note}")
    if not found:
        print("nothing differs")
    if stays:
        print(f"not all of the file holds: restart the gateway to change {', '.join(stays)}", file=sys.stderr)
        return EXIT_NEEDS_RESTART
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    from planner.decisions.views import Role
    from prfaas.commands.convert import ConvertWish, convert

    wish = ConvertWish(
        node=arguments.node,
        role=Role(arguments.to),
        drain_timeout_s=arguments.drain_timeout,
        verify_timeout_s=arguments.verify_timeout,
        force=arguments.force,
        certificate=arguments.certificate,
    )
    return run_until_done(convert(wish, arguments.config, _telling(_console())))


def _check(arguments: argparse.Namespace) -> int:
    from prfaas.commands.checking.check import check

    return run_until_done(check(arguments.config, _console(), arguments.json))


def _nodes(arguments: argparse.Namespace) -> int:
    from prfaas.commands.fleet.nodes import NodesWish, add, remove, show

    wish, say = NodesWish(gateway_file=arguments.config, file=arguments.file), _telling(_console())
    if arguments.action == "list":
        return 0 if show(wish, _console(), arguments.json) else EXIT_FAILED
    if arguments.action == "remove":
        remove(wish, arguments.node, say)
        return 0
    words = {key: getattr(arguments, key) for key in ("agent", "name", "cluster", "role", "revision")}
    add(wish, {"id": arguments.node, "labels": dict(arguments.label), **words}, say)
    return 0


def _hear_no_hang_up() -> None:
    """SIGHUP has what runs for long read its file again; SIGUSR2 has a gateway replaced. While it starts, neither ends it."""
    for number in (signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


# Commands that ask a running system.
ASKING: Final = {
    "explain": (add_explain, _explain),
    "top": (add_top, _top),
    "flows": (add_flows, _flows),
    "drain": (add_drain, _drain),
    "reload": (add_reload, _reload),
    "convert": (add_convert, _convert),
    "nodes": (add_nodes, _nodes),
}


if __name__ == "__main__":
    sys.exit(main())

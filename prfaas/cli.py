"""The command line of `prfaas`: one parser, and one module of `prfaas.commands` for each command that needs one."""

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

import prfaas
from node.command_line import add_node_arguments, config_from, split_engine_args
from prfaas.commands.argument_types import header, link, seconds, within
from prfaas.commands.preparing import STATE_DIR, add_preparations
from prfaas.ending import EXIT_FAILED, EXIT_INTERRUPTED, ended_by_signals, run_until_done
from prfaas.errors import (
    CertificateError,
    CheckError,
    ConversionError,
    InitError,
    KeyNameError,
    PrfaasError,
    StartRefused,
    TopologyError,
)
from transport.control.grpc_environment import for_grpc

if TYPE_CHECKING:
    from prfaas.system.system import System
    from prfaas.system.topology import Topology

EXIT_NEEDS_RESTART = 3
EXIT_BAD_CONFIG = 2
WIDTH_WHEN_PIPED = 160


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status: 0 done, 1 failed, 2 bad configuration or arguments."""
    os.environ.update(for_grpc(os.environ))
    own, engine_args = split_engine_args(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    arguments = parser.parse_args(own)
    if engine_args and arguments.command != "node":
        parser.error("only `prfaas node` takes arguments for an engine after --")
    arguments.engine_args = engine_args
    try:
        status: int = arguments.run(arguments)
    except PrfaasError as exc:
        print(f"prfaas {arguments.command}: {exc}", file=sys.stderr)
        return (
            EXIT_BAD_CONFIG
            if isinstance(
                exc,
                TopologyError
                | CertificateError
                | ConversionError
                | CheckError
                | InitError
                | KeyNameError
                | StartRefused,
            )
            else EXIT_FAILED
        )
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prfaas", description="Prefill-as-a-Service: long prefills run in another cluster."
    )
    parser.add_argument("--version", action="version", version=f"prfaas {prfaas.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="start two clusters here, replay a real trace, check every claim, and end")
    _add_topology(demo)
    demo.add_argument(
        "--requests", type=within(1, 110), default=110, metavar="N", help="how many of the 110 trace rows to replay"
    )
    demo.set_defaults(run=_demo)

    up = commands.add_parser("up", help="start a gateway and its clusters on this machine and leave them running")
    _add_topology(up)
    up.add_argument("--port", type=within(0, 65535), metavar="PORT", help="the API's port, instead of the file's")
    up.set_defaults(run=_up)

    gateway = commands.add_parser("gateway", help="run one gateway")
    gateway.add_argument(
        "-c", "--config", required=True, metavar="FILE.toml", help="configuration with a [gateway] table"
    )
    gateway.add_argument(
        "--workers", type=within(1, 64), metavar="N", help="processes that answer on its port, instead of the file's"
    )
    gateway.set_defaults(run=_gateway)

    node = commands.add_parser("node", help="run one node: agent and engine; arguments after -- go to the engine")
    add_node_arguments(node)
    node.set_defaults(run=_node)

    _add_explain(commands.add_parser("explain", help="show where a request would go now, and why; sends nothing"))
    check = commands.add_parser("check", help="check that a gateway's nodes fit together and reach each other")
    check.add_argument(
        "-c", "--config", type=Path, default=STATE_DIR / "up" / "gateway.toml", metavar="FILE.toml",
        help="the gateway's file (default: that of `prfaas up`, %(default)s)",
    )  # fmt: skip
    check.add_argument("--json", action="store_true", help="findings as JSON")
    check.set_defaults(run=_check)

    _add_top(
        commands.add_parser(
            "top", help="links, clusters, nodes and requests of a running gateway, a screenful a second"
        )
    )
    _add_flows(commands.add_parser("flows", help="follow transfers over links, and their reasons"))
    _add_drain(commands.add_parser("drain", help="stop new work over a link, or to a node, for maintenance"))
    _add_reload(commands.add_parser("reload", help="make a gateway read its file again"))
    _add_convert(commands.add_parser("convert", help="change the role of a node of a PD cluster while it serves"))

    add_preparations(commands)
    return parser


def _add_topology(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-c", "--config", type=Path, metavar="FILE.toml", help="topology (default: one PrfaaS and one PD cluster)"
    )
    parser.add_argument(
        "--state-dir", type=Path, default=STATE_DIR, metavar="DIR", help="models, logs and sockets (default: .prfaas)"
    )


def _add_gateway(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-u", "--url", default="http://127.0.0.1:8000", metavar="URL",
        help="the gateway's address for operators: its port, or its metrics_port if it has one (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--ca", type=Path, metavar="FILE.pem",
        help="the authority of an https URL's certificate, or that certificate (default: those this host trusts)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="as JSON")


def _add_gateway_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-c", "--config", type=Path, default=STATE_DIR / "up" / "gateway.toml", metavar="FILE.toml",
        help="a gateway's file, which lists the nodes (default: that of `prfaas up`, %(default)s)",
    )  # fmt: skip


def _add_explain(parser: argparse.ArgumentParser) -> None:
    _add_gateway(parser)
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("file", nargs="?", metavar="FILE", help="the request's JSON body; - or nothing: standard input")
    asked.add_argument("--prompt", metavar="TEXT", help="a prompt instead")
    asked.add_argument("--tokens", type=within(1, 10**6), metavar="N", help="a prompt of N tokens, none of them cached")
    parser.add_argument("--model", metavar="NAME", help="the model for --prompt and --tokens (default: the served one)")
    parser.add_argument("--tenant", metavar="NAME", help="explain it for this tenant, where the gateway has tenants")
    parser.add_argument("--endpoint", metavar="PATH", help="the path for the body, if its fields do not show it")
    parser.add_argument(
        "-H", "--header", action="append", type=header, default=[], metavar="NAME:VALUE",
        help="a header of the request, such as x-prfaas-class:batch; may be repeated",
    )  # fmt: skip
    parser.set_defaults(run=_explain)


def _add_top(parser: argparse.ArgumentParser) -> None:
    _add_gateway(parser)
    parser.add_argument("--once", action="store_true", help="one page, and end")
    parser.add_argument(
        "--every", type=seconds, default=1.0, metavar="S", help="between two pages (default: %(default)s)"
    )
    parser.set_defaults(run=_top)


def _add_flows(parser: argparse.ArgumentParser) -> None:
    _add_gateway(parser)
    parser.add_argument("--once", action="store_true", help="print the known ones, and end")
    parser.add_argument("--all", action="store_true", help="within clusters, too")
    parser.add_argument("--link", type=link, metavar="FROM:TO", help="only between these two clusters")
    parser.add_argument(
        "--kind", action="append", default=[], choices=["request", "move", "replica", "probe"],
        help="only this kind; may be repeated",
    )  # fmt: skip
    parser.set_defaults(run=_flows)


def _add_drain(parser: argparse.ArgumentParser) -> None:
    _add_gateway(parser)
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument(
        "link",
        nargs="?",
        type=link,
        metavar="FROM:TO",
        help="the clusters that the link joins, as `prfaas top` names them",
    )
    wanted.add_argument("--node", metavar="NODE", help="drain a node instead: its node_id, or host:port of its agent")
    parser.add_argument("--undo", action="store_true", help="use the link or node again")
    _add_gateway_file(parser)
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=0.0,
        metavar="S",
        help="seconds to wait for a node's running work (default: 0)",
    )
    _add_certificate(parser)
    parser.set_defaults(run=_drain)


def _add_certificate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--certificate", type=Path, metavar="FILE.pem",
        help="an operator's, with its key beside it (default: operator.pem beside the gateway's)",
    )  # fmt: skip


def _add_reload(parser: argparse.ArgumentParser) -> None:
    _add_gateway(parser)
    parser.add_argument("--dry-run", action="store_true", help="only say what differs")
    parser.set_defaults(run=_reload)


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("node", metavar="NODE", help="its node_id, or host:port of its agent")
    parser.add_argument("--to", required=True, choices=["prefill", "decode"], help="the new role")
    _add_gateway_file(parser)
    parser.add_argument(
        "--drain-timeout", type=seconds, default=0.0, metavar="S",
        help="seconds after which the node keeps its old role (default: the node's drain_timeout_s)",
    )  # fmt: skip
    parser.add_argument(
        "--verify-timeout", type=seconds, default=0.0, metavar="S", help="seconds to wait for its engine's answer (default: 30)"
    )  # fmt: skip
    parser.add_argument(
        "--force", action="store_true", help="convert even the last ready node of its role in its cluster"
    )
    _add_certificate(parser)
    parser.set_defaults(run=_convert)


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
            raise TopologyError(
                "[model]: profile: a demo compares answers with a model's own, and there is no model; use `prfaas up`"
            )
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
    return gateway_main(["-c", arguments.config, *workers])


def _node(arguments: argparse.Namespace) -> int:
    _hear_no_hang_up()
    from node.errors import NodeConfigError
    from node.main import check_model, run

    try:
        config = config_from(arguments, arguments.engine_args)
        check_model(config)
    except NodeConfigError as exc:
        print(f"prfaas node: {exc}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    if config.cluster_kind == "prfaas":
        from prfaas_cluster.role import PRFAAS as role
    else:
        from pd_cluster.role import PD as role
    return run(config, role, lambda: config_from(arguments, arguments.engine_args))


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


def _hear_no_hang_up() -> None:
    """What runs for long reads its file again on SIGHUP; until it is there to do so, which takes a second, nothing ends it."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main())

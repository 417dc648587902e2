"""The arguments of `prfaas epp`. Manifests of llm-d and of the Gateway API pass those of pools and ports."""

import argparse
from typing import TYPE_CHECKING, Any

from membership.kubernetes.settings import IN_CLUSTER
from planner.decisions.defaults import DEPLOYED
from planner.decisions.routing.placement import PLACERS
from prfaas.commands.argument_types import seconds, within
from prfaas.commands.descriptions import COMMANDS

if TYPE_CHECKING:
    from planner.commands.command_parser import CommandParser

    Commands = argparse._SubParsersAction[CommandParser]
else:
    Commands = Any


def add_epp(commands: Commands) -> argparse.ArgumentParser:
    """The command with all its arguments."""
    epp = commands.add_parser("epp", **COMMANDS["epp"].arguments())
    _add_servers(epp)
    _add_ports(epp)
    _add_choice(epp)
    return epp


def _add_servers(epp: argparse.ArgumentParser) -> None:
    which = epp.add_mutually_exclusive_group()
    which.add_argument(
        "--endpoints",
        metavar="FILE",
        help="file that lists the servers: llm-d's format in JSON, or ours; it is watched",
    )
    which.add_argument("--selector", metavar="LABELS", help="label selector of the servers' Pods")
    epp.add_argument(
        "--pool-name",
        default="",
        metavar="NAME",
        help="the InferencePool, where neither --endpoints nor --selector is given; the name in metrics (default: pool)",
    )
    epp.add_argument(
        "--pool-namespace", default="", metavar="NAME", help="namespace of the pool and its Pods (default: our own)"
    )
    epp.add_argument(
        "--api-server",
        default=IN_CLUSTER,
        metavar="URL",
        help="Kubernetes' API, such as `kubectl proxy` (default: the cluster that we run in)",
    )
    epp.add_argument(
        "--target-port",
        type=within(1, 65535),
        metavar="PORT",
        help="with --selector: where Pods answer (default: 8000)",
    )
    for name, what in (("certificate", "of a gateway"), ("key", "to it"), ("authority", "of the nodes, or their list")):
        epp.add_argument(
            f"--node-{name}",
            default="",
            metavar="FILE",
            help=f"where PrfaaS nodes have certificates: the {name} {what}",
        )


def _add_ports(epp: argparse.ArgumentParser) -> None:
    epp.add_argument("--host", default="127.0.0.1", metavar="HOST", help="address of all ports (default: %(default)s)")
    epp.add_argument(
        "--cert-path",
        default="",
        metavar="DIR",
        help="TLS at the port that proxies ask: a folder with tls.crt and tls.key, read anew when they change",
    )
    epp.add_argument(
        "--client-ca",
        default="",
        metavar="FILE",
        help="with --cert-path: proxies must show a certificate that one of these authorities has signed",
    )
    for name, port, what in (
        ("--grpc-port", 9002, "port that proxies ask"),
        ("--grpc-health-port", 9003, "port of grpc.health.v1"),
        ("--metrics-port", 9090, "port of /metrics"),
    ):
        epp.add_argument(
            name, type=within(0, 65535), default=port, metavar="PORT", help=f"{what}, 0 for any (default: %(default)s)"
        )


def _add_choice(epp: argparse.ArgumentParser) -> None:
    epp.add_argument(
        "--placement",
        choices=tuple(PLACERS),
        default=DEPLOYED.placement,
        help="which server: as the gateway's key of that name (default: %(default)s)",
    )
    epp.add_argument(
        "--fallbacks",
        type=within(0, 7),
        default=0,
        metavar="N",
        help="name N more servers after the best one; not every proxy reads a list (default: 0)",
    )
    epp.add_argument(
        "--prefill-tokens-per-s",
        type=within(1, 10**7),
        default=20_000,
        metavar="N",
        help="what a server computes of prompts, to predict queues with (default: %(default)s)",
    )
    epp.add_argument(
        "--queue",
        type=within(1, 10**6),
        default=5,
        metavar="N",
        help="requests that wait at a server from which on it is saturated (default: %(default)s)",
    )
    epp.add_argument(
        "--max-in-flight",
        type=within(1, 10**6),
        default=10_000,
        metavar="N",
        help="requests under way from which on all others are refused (default: %(default)s)",
    )
    epp.add_argument(
        "--objective",
        type=objective,
        action="append",
        default=[],
        metavar="NAME=PRIORITY",
        help="priority of an objective; below 0 it is refused while all servers are saturated. May be repeated",
    )
    epp.add_argument(
        "--drain-timeout",
        type=seconds,
        default=60.0,
        metavar="S",
        help="how long running requests may go on after SIGTERM (default: %(default)g)",
    )


def objective(text: str) -> tuple[str, int]:
    """NAME=PRIORITY."""
    name, sign, priority = text.rpartition("=")
    if not sign or not name or not priority.removeprefix("-").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: must be NAME=PRIORITY, with an integer")
    return name, int(priority)

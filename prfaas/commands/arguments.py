"""The arguments of the commands of `prfaas` that start or ask something."""

import argparse
from pathlib import Path

from prfaas.commands.argument_types import header, label, link, seconds, within
from prfaas.commands.descriptions import COMMANDS
from prfaas.commands.preparing import STATE_DIR


def add_topology(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-c",
        "--config",
        type=Path,
        metavar="FILE.toml",
        help="topology file (default: one PrfaaS and one PD cluster, configs/local.toml)",
    )
    parser.add_argument(
        "--state-dir",
        type=Path,
        default=STATE_DIR,
        metavar="DIR",
        help="directory of models, logs and sockets (default: %(default)s)",
    )


def add_gateway(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-u", "--url", default="http://127.0.0.1:8000", metavar="URL",
        help="the gateway's address: its metrics_port if it has one, else its port (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--ca", type=Path, metavar="FILE.pem",
        help="for an https URL: the certificate's authority, or the certificate (default: what this host trusts)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_gateway_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-c", "--config", type=Path, default=STATE_DIR / "up" / "gateway.toml", metavar="FILE.toml",
        help="a gateway's file, which lists the nodes (default: the one of `prfaas up`, %(default)s)",
    )  # fmt: skip


def add_explain(parser: argparse.ArgumentParser) -> None:
    add_gateway(parser)
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument(
        "file", nargs="?", metavar="FILE", help="file with the request's JSON body (default: standard input, also as -)"
    )
    asked.add_argument("--prompt", metavar="TEXT", help="explain this prompt instead of a body")
    asked.add_argument(
        "--tokens", type=within(1, 10**6), metavar="N", help="explain a prompt of N tokens without a cached prefix"
    )
    parser.add_argument("--model", metavar="NAME", help="the model for --prompt and --tokens (default: the served one)")
    parser.add_argument("--tenant", metavar="NAME", help="explain it for this tenant (default: none)")
    parser.add_argument(
        "--endpoint", metavar="PATH", help="path that the body is for, such as /v1/completions (default: by its fields)"
    )
    parser.add_argument(
        "-H", "--header", action="append", type=header, default=[], metavar="NAME:VALUE",
        help="add a header of the request, such as x-prfaas-class:batch; may be repeated",
    )  # fmt: skip


def add_top(parser: argparse.ArgumentParser) -> None:
    add_gateway(parser)
    parser.add_argument("--once", action="store_true", help="print one page, and exit")
    parser.add_argument(
        "--every", type=seconds, default=1.0, metavar="S", help="seconds between two pages (default: %(default)s)"
    )


def add_flows(parser: argparse.ArgumentParser) -> None:
    add_gateway(parser)
    parser.add_argument("--once", action="store_true", help="print the transfers known so far, and exit")
    parser.add_argument("--all", action="store_true", help="show transfers within clusters, too")
    parser.add_argument("--link", type=link, metavar="FROM:TO", help="show only transfers between these two clusters")
    parser.add_argument(
        "--kind", action="append", default=[], choices=["request", "move", "replica", "probe"],
        help="show only this kind; may be repeated",
    )  # fmt: skip


def add_drain(parser: argparse.ArgumentParser) -> None:
    add_gateway(parser)
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument(
        "link",
        nargs="?",
        type=link,
        metavar="FROM:TO",
        help="the link to drain: its two clusters, as `prfaas top` names them",
    )
    wanted.add_argument("--node", metavar="NODE", help="drain a node instead: its node_id, or host:port of its agent")
    parser.add_argument("--undo", action="store_true", help="end the drain: use the link or node again")
    add_gateway_file(parser)
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=0.0,
        metavar="S",
        help="seconds to wait for a node's running work (default: 0, no wait)",
    )
    add_certificate(parser)


def add_certificate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--certificate", type=Path, metavar="FILE.pem",
        help="an operator's certificate, with its key beside it (default: operator.pem beside the gateway's)",
    )  # fmt: skip


def add_reload(parser: argparse.ArgumentParser) -> None:
    add_gateway(parser)
    parser.add_argument("--dry-run", action="store_true", help="only show what would change")


def add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("node", metavar="NODE", help="the node: its node_id, or host:port of its agent")
    parser.add_argument("--to", required=True, choices=["prefill", "decode"], help="the new role")
    add_gateway_file(parser)
    parser.add_argument(
        "--drain-timeout", type=seconds, default=0.0, metavar="S",
        help="seconds for running work to end, else the node keeps its old role (default: its drain_timeout_s)",
    )  # fmt: skip
    parser.add_argument(
        "--verify-timeout", type=seconds, default=0.0, metavar="S",
        help="seconds for the engine's answer in the new role (default: 30)",
    )  # fmt: skip
    parser.add_argument(
        "--force", action="store_true", help="convert it even if it is its cluster's last ready node of that role"
    )
    add_certificate(parser)


def add_nodes(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("list", **COMMANDS["nodes list"].arguments())
    listing.add_argument("--json", action="store_true", help="print JSON")
    adding = actions.add_parser("add", **COMMANDS["nodes add"].arguments())
    adding.add_argument("node", metavar="NODE", help="its node_id")
    adding.add_argument("agent", metavar="HOST:PORT", help="where its agent answers")
    adding.add_argument("--name", default="", metavar="NAME", help="name in its certificate (default: the host)")
    for key in ("cluster", "role", "revision"):
        adding.add_argument(f"--{key}", default="", metavar=key.upper(), help=f"{key} to show until its agent answers")
    adding.add_argument(
        "--label", action="append", type=label, default=[], metavar="KEY=VALUE", help="a label; may be repeated"
    )
    removing = actions.add_parser("remove", **COMMANDS["nodes remove"].arguments())
    removing.add_argument("node", metavar="NODE", help="its node_id, or host:port of its agent")
    for each in (listing, adding, removing):
        add_gateway_file(each)
        each.add_argument(
            "--file", type=Path, metavar="FILE", help="a file of members (default: the one that the gateway watches)"
        )

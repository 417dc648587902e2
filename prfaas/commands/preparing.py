"""The commands that prepare a system before anything of it runs: `prfaas init|key|certificates|model`."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prfaas.commands.argument_types import day, within
from prfaas.errors import TopologyError
from transport.control.settings import mapped

if TYPE_CHECKING:
    from prfaas.system.certificates import CertificateHolder

STATE_DIR = Path(".prfaas")


def add_preparations(commands: Any) -> None:
    """Adds them to the parser's subcommands."""
    _add_init(commands.add_parser("init", help="write commented files for a first system, on one machine or several"))
    key = commands.add_parser("key", help="make an API key, for a tenant of a gateway or for one of its operators")
    key.add_argument(
        "name",
        metavar="NAME",
        help="the key's tenant, or with --operator its operator; the name 'operator' makes an operator with all rights",
    )
    key.add_argument("--operator", choices=["viewer", "operator", "admin"], metavar="ROLE", dest="role",
                     help="make it for an operator of this role instead of a tenant")  # fmt: skip
    key.add_argument("--expires", type=day, metavar="DATE", help="from when on it is refused, as 2027-01-31")
    key.set_defaults(run=_key)
    certificates = commands.add_parser(
        "certificates", help="make an authority of your own and certificates for nodes and gateways"
    )
    certificates.add_argument(
        "names", nargs="+", type=_holder, metavar="CLUSTER/ROLE/NAME[=HOST,...]",
        help="east/prefill/NODE_ID of a PrfaaS cluster, west/node/NODE_ID of a PD cluster; or gateway, planner, operator; "
        "HOSTs are names and addresses under which it is reached",
    )  # fmt: skip
    certificates.add_argument("--trust", default="prfaas", metavar="NAME", help="trust domain of all (default: prfaas)")
    certificates.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory of the files")
    certificates.add_argument("--days", type=within(1, 3650), default=365, metavar="N", help="how long they are valid")
    certificates.set_defaults(run=_certificates)
    _add_model(commands.add_parser("model", help="build a tiny model of a real hybrid architecture, offline"))


def _add_init(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="where to write them")
    parser.add_argument("--model", metavar="DIR", help="the model's directory")
    parser.add_argument("--engine", choices=["embedded", "vllm", "sglang"], help="the engine (default: embedded)")
    for name, what in (
        ("decode", "machines that decode"),
        ("prefill", "machines beside them that prefill, - for none"),
        ("remote", "machines of the remote prefill cluster, - for none"),
        ("gateway", "machine of the gateway"),
    ):
        parser.add_argument(f"--{name}", metavar="HOST" if name == "gateway" else "HOST,...", help=what)
    secured = parser.add_mutually_exclusive_group()
    secured.add_argument(
        "--tls", action="store_true", help="certificates for all, KVCache encrypted (default on several machines)"
    )
    secured.add_argument("--plain", action="store_true", help="none, also on several machines: all of it in clear")
    parser.add_argument("--overwrite", action="store_true", help="replace files that are there")
    parser.add_argument("--yes", action="store_true", help="ask nothing, and take defaults for missing answers")
    parser.set_defaults(run=_init)


def _add_model(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    build = actions.add_parser("build", help="write a seeded model with a byte-level tokenizer to a directory")
    build.add_argument(
        "-c", "--config", type=Path, metavar="FILE.toml", help="take arch and seed from a topology's [model]"
    )
    build.add_argument("--arch", help="kimi_linear, qwen3_next, granite_hybrid, lfm2, gemma3 or llama")
    build.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to write it")
    build.add_argument("--seed", type=int, help="of the random weights (default 0)")
    build.add_argument("--overwrite", action="store_true", help="replace what is there")
    build.set_defaults(run=_model_build)


def _holder(text: str) -> "CertificateHolder":
    from prfaas.system.certificates import holder

    try:
        return holder(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


def _init(arguments: argparse.Namespace) -> int:
    from prfaas.commands.init import QUESTIONS, asked, init, site_of

    def ask(question: str, default: str) -> str:
        if arguments.yes or not sys.stdin.isatty():
            return default
        return input(f"{question} [{default}]: ")

    site = site_of(asked({key: getattr(arguments, key) for key in QUESTIONS}, ask), arguments.tls, arguments.plain)
    init(site, arguments.folder, arguments.overwrite, print)
    return 0


def _key(arguments: argparse.Namespace) -> int:
    from gateway.config.operators import OperatorRole
    from prfaas.commands.keys import make_and_tell

    role = OperatorRole(arguments.role) if arguments.role is not None else None
    make_and_tell(arguments.name, print, role, arguments.expires)
    return 0


def _certificates(arguments: argparse.Namespace) -> int:
    from prfaas.system.certificates import issue_and_tell

    holders = [each.of_trust(arguments.trust) for each in arguments.names]
    issue_and_tell(arguments.out, holders, arguments.days, print)
    return 0


def _model_build(arguments: argparse.Namespace) -> int:
    from prfaas.system.models import build
    from prfaas.system.topology import ModelChoice, load_topology

    named = load_topology(arguments.config, STATE_DIR).model if arguments.config else ModelChoice(arch="kimi_linear")
    with mapped(TopologyError):
        choice = ModelChoice(
            arch=arguments.arch or named.arch, seed=named.seed if arguments.seed is None else arguments.seed
        )
    build(choice.arch, arguments.out, choice.seed, arguments.overwrite, print)
    return 0

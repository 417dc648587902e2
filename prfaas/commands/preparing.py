"""The commands that prepare a system before anything of it runs: `prfaas init|key|certificates|model`."""

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prfaas.commands.argument_types import day_after, within
from prfaas.commands.descriptions import COMMANDS
from prfaas.errors import TopologyError
from transport.control.settings import mapped

if TYPE_CHECKING:
    from prfaas.system.certificates import CertificateHolder

STATE_DIR = Path(".prfaas")


def add_preparations(commands: Any) -> None:
    """Adds them to the parser's subcommands."""
    _add_init(commands.add_parser("init", **COMMANDS["init"].arguments()))
    key = commands.add_parser("key", **COMMANDS["key"].arguments())
    key.add_argument(
        "name",
        metavar="NAME",
        help="name of the tenant, or with --operator of the operator; 'operator' makes an operator with all rights",
    )
    key.add_argument("--operator", choices=["viewer", "operator", "admin"], metavar="ROLE", dest="role",
                     help="make the key for an operator of this role: viewer, operator or admin")  # fmt: skip
    key.add_argument(
        "--expires",
        type=day_after(datetime.now(UTC).date()),
        metavar="DATE",
        help="day from which the key is refused, such as 2027-01-31 (default: never)",
    )
    key.set_defaults(run=_key)
    certificates = commands.add_parser("certificates", **COMMANDS["certificates"].arguments())
    certificates.add_argument(
        "names", nargs="+", type=_holder, metavar="CLUSTER/ROLE/NAME[=HOST,...]",
        help="holder of a certificate: east/prefill/NODE_ID for a node of the PrfaaS cluster east, west/node/NODE_ID for one of "
        "the PD cluster west, or gateway, planner, operator. HOSTs are the names and addresses that reach it",
    )  # fmt: skip
    certificates.add_argument(
        "--trust",
        default="prfaas",
        metavar="NAME",
        help="trust domain in the certificates' names (default: %(default)s)",
    )
    certificates.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to write the files to")
    certificates.add_argument(
        "--by-cluster",
        action="store_true",
        help="make an authority for each cluster, and a list of them, which bounds each one to names of its cluster",
    )
    certificates.add_argument(
        "--days", type=within(1, 3650), default=365, metavar="N", help="days of validity (default: %(default)s)"
    )
    certificates.set_defaults(run=_certificates)
    _add_model(commands.add_parser("model", **COMMANDS["model"].arguments()))


def _add_init(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="directory to write the files to")
    parser.add_argument(
        "--model",
        metavar="[NAME=]DIR",
        action="append",
        help="the model's directory: config.json, weights, tokenizer; give it again for further models",
    )
    parser.add_argument("--engine", choices=["embedded", "vllm", "sglang"], help="the engine (default: embedded)")
    for name, what in (
        ("decode", "machines that decode (default: this machine)"),
        ("prefill", "machines of the same cluster that prefill, - for none"),
        ("remote", "machines of the remote PrfaaS cluster, - for none"),
        ("gateway", "machine of the gateway (default: this machine)"),
    ):
        parser.add_argument(f"--{name}", metavar="HOST" if name == "gateway" else "HOST,...", help=what)
    secured = parser.add_mutually_exclusive_group()
    secured.add_argument(
        "--tls", action="store_true", help="make certificates and encrypt all traffic (default on several machines)"
    )
    secured.add_argument(
        "--plain", action="store_true", help="use no certificates: all traffic is in clear, also between machines"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace existing files")
    parser.add_argument("--yes", action="store_true", help="ask nothing; use defaults for what is left out")
    parser.set_defaults(run=_init)


def _add_model(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    build = actions.add_parser("build", **COMMANDS["model build"].arguments())
    build.add_argument(
        "-c", "--config", type=Path, metavar="FILE.toml", help="take arch and seed from [model] of this topology"
    )
    build.add_argument(
        "--arch", metavar="NAME", help="kimi_linear (default), qwen3_next, granite_hybrid, lfm2, gemma3 or llama"
    )
    build.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to write the model to")
    build.add_argument("--seed", type=int, metavar="N", help="seed of the random weights (default: 0)")
    build.add_argument("--overwrite", action="store_true", help="replace an existing model")
    build.set_defaults(run=_model_build)


def _holder(text: str) -> "CertificateHolder":
    from prfaas.system.certificates import holder

    try:
        return holder(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


def _init(arguments: argparse.Namespace) -> int:
    from prfaas.commands.init import QUESTIONS, asked, init, site_of
    from prfaas.commands.site_files.model_tables import SiteModel

    def ask(question: str, default: str) -> str:
        if arguments.yes or not sys.stdin.isatty():
            return default
        return input(f"{question} [{default}]: ")

    first, *more = arguments.model or [None]
    answers = asked({**{key: getattr(arguments, key) for key in QUESTIONS}, "model": first}, ask)
    site = site_of(answers, arguments.tls, arguments.plain, [SiteModel.parse(each) for each in more])
    init(site.with_absolute_models(), arguments.folder, arguments.overwrite, print)
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
    issue_and_tell(arguments.out, holders, arguments.days, print, by_cluster=arguments.by_cluster)
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

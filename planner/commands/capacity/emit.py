"""`prfaas-plan emit`: a plan file as what deployments read."""

import argparse
from collections.abc import Sequence
from typing import Any

from planner.commands.capacity.options import site_of
from planner.commands.rendering.deployed import DeployedPlan, gateway_toml, helm_values, init_command
from planner.commands.rendering.output import remark
from planner.errors import InputError
from planner.model.reading import named, number, read_json
from planner.model.site import INSTANCES
from planner.simulator.trials.trial import read_plan
from transport.control.settings import require_tables


def run(args: argparse.Namespace) -> int:
    setting, _ = read_plan(args.plan)
    with named(f"plan {args.plan}"):
        table = read_json(args.plan)
        _check_counts(table)
        plan = DeployedPlan.of(site_of(args), setting, table)
    match args.form:
        case "gateway":
            text = gateway_toml(plan)
        case "init":
            text = init_command(plan, _hosts(args.hosts))
        case _:
            text = helm_values(plan, plan.cluster(args.cluster), args.engine)
    if args.output is None:
        print(text, end="")
        return 0
    args.output.write_text(text)
    remark(f"wrote {args.output}")
    return 0


def _check_counts(table: dict[str, Any]) -> None:
    """Raises SettingsError."""
    if table.get("num_prfaas") is not None:
        number(table, "num_prfaas", INSTANCES)
    for each in require_tables(table.get("prfaas_clusters", []), "prfaas_clusters"):
        number(each, "instances", INSTANCES)


def _hosts(texts: Sequence[str]) -> dict[str, list[str]]:
    """Machines by cluster. Raises InputError."""
    found: dict[str, list[str]] = {}
    for text in texts:
        cluster, separator, names = text.partition("=")
        hosts = [name.strip() for name in names.split(",")]
        if not separator or not all(hosts) or cluster in found:
            raise InputError(f"--hosts {text!r}: write CLUSTER=HOST,HOST,…, once for each cluster")
        found[cluster] = hosts
    return found

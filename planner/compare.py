"""Plans or policies side by side, on the same requests."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from planner.admission import AdmissionPolicy
from planner.errors import InputError
from planner.placement import PLACERS
from planner.plan import Options, make_plan
from planner.simulator.outcome import Outcome, over_seeds
from planner.simulator.scenario import Scenario
from planner.site import Site
from planner.trials import Setting, Source, Trial, run, scenario_of

# A policy names a deployment, a placement or an admission rule; what it does not name stays as the trial has it.
POLICIES: Final = MappingProxyType[str, dict[str, str]](
    {
        "prfaas": {"deployment": ""},
        "homogeneous": {"deployment": "homogeneous"},
        "naive": {"deployment": "naive"},
        **{name: {"placer": name} for name in PLACERS},
        **{str(name): {"admission": str(name)} for name in AdmissionPolicy},
    }
)


@dataclass(frozen=True, slots=True)
class Contender:
    """A named scenario and the Λ its plan promises."""

    name: str
    scenario: Scenario
    lambda_max: float

    def run(self, source: Source, seeds: Sequence[int]) -> list[Outcome]:
        return run(self.scenario, source, seeds)


def contenders_of(
    site: Site,
    options: Options,
    trial: Trial,
    *,
    policies: Sequence[str] = (),
    plans: Sequence[Path] = (),
    deployments: Sequence[str] = (),
    base: str | None = None,
) -> list[Contender]:
    """One contender per plan file, deployment and policy; policies that name no deployment run on `base`.

    Raises InputError naming the policies there are.
    """
    return [
        *(_planned(site, trial, path) for path in plans),
        *(_deployed(site, options, trial, name, name) for name in deployments),
        *(_by_policy(site, options, trial, name, base) for name in policies),
    ]


def _planned(site: Site, trial: Trial, path: Path) -> Contender:
    try:
        table = json.loads(path.read_text())
        setting = Setting(
            table["threshold_tokens"], table.get("tie_share", 0.0), table["num_prefill"], table["num_decode"]
        )
        return Contender(path.stem, scenario_of(site, setting, trial), table["lambda_max_req_per_s"])
    except (KeyError, ValueError) as exc:
        raise InputError(f"plan {path}: {exc!r}") from exc


def _by_policy(site: Site, options: Options, trial: Trial, name: str, base: str | None) -> Contender:
    if name not in POLICIES:
        raise InputError(f"policy {name!r}: must be one of {', '.join(POLICIES)}")
    policy = POLICIES[name]
    deployment = policy.get("deployment", base) or None
    placer = policy.get("placer", trial.placer)
    admission = AdmissionPolicy(policy.get("admission", trial.admission))
    return _deployed(site, options, replace(trial, placer=placer, admission=admission), name, deployment)


def _deployed(site: Site, options: Options, trial: Trial, name: str, deployment: str | None) -> Contender:
    plan = make_plan(site, options, deployment)
    deployed = site.deployed(deployment)[0] if deployment else site
    return Contender(name, scenario_of(deployed, Setting.of(plan), trial), plan.lambda_max)


def compare(contenders: Sequence[Contender], source: Source, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """One row per contender: its simulation report, over all seeds."""
    rows = []
    for contender in contenders:
        report = over_seeds([outcome.report() for outcome in contender.run(source, seeds)])
        rows.append({"name": contender.name, "lambda_max": contender.lambda_max, **report})
    return rows

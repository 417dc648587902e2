"""Plans or policies side by side, on the same requests."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from planner.decisions.admission.overload import AdmissionPolicy
from planner.errors import InputError
from planner.model.site import Site
from planner.simulator.outcome import SimulationOutcome, over_seeds
from planner.simulator.policies import POLICIES
from planner.simulator.scenario import Scenario
from planner.simulator.trials.trial import Source, Trial, TrialSetting, read_plan, run, scenario_of
from planner.solve.plan import outline
from planner.solve.problem import SolveOptions


@dataclass(frozen=True, slots=True)
class NamedScenario:
    """A named scenario and the Λ its plan promises."""

    name: str
    scenario: Scenario
    lambda_max: float

    def run(self, source: Source, seeds: Sequence[int], processes: int = 1) -> list[SimulationOutcome]:
        return run(self.scenario, source, seeds, processes)


def contenders_of(
    site: Site,
    options: SolveOptions,
    trial: Trial,
    *,
    policies: Sequence[str] = (),
    plans: Sequence[Path] = (),
    deployments: Sequence[str] = (),
    base: str | None = None,
) -> list[NamedScenario]:
    """One contender per plan file, deployment and policy; policies that name no deployment run on `base`.

    Raises InputError naming the policies there are.
    """
    return [
        *(_planned(site, trial, path) for path in plans),
        *(_deployed(site, options, trial, name, name) for name in deployments),
        *(_by_policy(site, options, trial, name, base) for name in policies),
    ]


def _planned(site: Site, trial: Trial, path: Path) -> NamedScenario:
    setting, lambda_max = read_plan(path)
    return NamedScenario(path.stem, scenario_of(site, setting, trial), lambda_max)


def _by_policy(site: Site, options: SolveOptions, trial: Trial, name: str, base: str | None) -> NamedScenario:
    if name not in POLICIES:
        raise InputError(f"policy {name!r}: must be one of {', '.join(POLICIES)}")
    policy = POLICIES[name]
    deployment = policy.get("deployment", base) or None
    placer = policy.get("placer", trial.placer)
    admission = AdmissionPolicy(policy.get("admission", trial.admission))
    return _deployed(site, options, replace(trial, placer=placer, admission=admission), name, deployment)


def _deployed(site: Site, options: SolveOptions, trial: Trial, name: str, deployment: str | None) -> NamedScenario:
    plan = outline(site, options, deployment)
    deployed = site.deployed(deployment)[0] if deployment else site
    return NamedScenario(name, scenario_of(deployed, TrialSetting.of(plan), trial), plan.lambda_max)


def compare(
    contenders: Sequence[NamedScenario], source: Source, seeds: Sequence[int], processes: int = 1
) -> list[dict[str, Any]]:
    """One row per contender: its simulation report, over all seeds."""
    rows = []
    for contender in contenders:
        report = over_seeds([outcome.report() for outcome in contender.run(source, seeds, processes)])
        rows.append({"name": contender.name, "lambda_max": contender.lambda_max, **report})
    return rows

"""A plan as what deployments read: values for the Helm chart, keys of a gateway's file, or a call of `prfaas init`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from shlex import join
from typing import Any, Final

from planner.decisions.views import ClusterKind
from planner.errors import InputError
from planner.model.site import Site
from planner.simulator.trials.trial import TrialSetting

CACHE_BYTES: Final = 17_179_869_184  # of a node, where the site does not say: the chart's own
INDENT: Final = "  "


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployedCluster:
    """A cluster as the plan has it."""

    name: str
    kind: ClusterKind
    num_prefill: int
    num_decode: int
    cache_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployedPlan:
    """What a plan configures. `threshold_tokens` is None where no node is in a PrfaaS cluster."""

    clusters: tuple[DeployedCluster, ...]
    threshold_tokens: int | None
    tie_share: float | None  # None: no length is shared

    @classmethod
    def of(cls, site: Site, setting: TrialSetting, table: Mapping[str, Any]) -> "DeployedPlan":
        """`table` is the plan file, which says how many PrfaaS instances are used. Raises InputError."""
        fleet = {each["name"]: each["instances"] for each in table.get("prfaas_clusters", [])}
        found = []
        for cluster in site.clusters:
            split = setting.split_of(cluster.name) if cluster.kind is ClusterKind.PD else (0, 0)
            if cluster.kind is ClusterKind.PRFAAS:
                said = fleet.get(cluster.name, table.get("num_prfaas", cluster.instances))
                if not 0 <= said <= cluster.instances:
                    raise InputError(f"plan: {said} PrfaaS instances, cluster {cluster.name!r} has {cluster.instances}")
                split = (int(said), 0)
            size = CACHE_BYTES if cluster.cache_gb is None else max(1, int(cluster.cache_gb * 1e9))
            found.append(
                DeployedCluster(
                    name=cluster.name, kind=cluster.kind, num_prefill=split[0], num_decode=split[1], cache_bytes=size
                )
            )
        sends = any(each.kind is ClusterKind.PRFAAS and each.num_prefill for each in found)
        can = sends and isfinite(setting.threshold_tokens)
        return cls(
            clusters=tuple(found),
            threshold_tokens=max(1, round(setting.threshold_tokens)) if can else None,
            tie_share=setting.tie_share if 0 < setting.tie_share < 1 else None,
        )

    def cluster(self, name: str | None) -> DeployedCluster:
        """One of them: without a name the only PD cluster. Raises InputError naming those there are."""
        pds = [each for each in self.clusters if each.kind is ClusterKind.PD]
        if name is None and len(pds) == 1:
            return pds[0]
        for each in self.clusters:
            if each.name == name:
                return each
        known = ", ".join(each.name for each in self.clusters)
        raise InputError(f"--cluster {name!r}: must be one of {known}" if name else f"--cluster: name one of {known}")


def gateway_toml(plan: DeployedPlan) -> str:
    """Keys of `[gateway]`."""
    lines = ["[gateway]"]
    if plan.threshold_tokens is None:
        lines.append("# the plan has no PrfaaS nodes: no prompt is long enough")
    else:
        lines.append(f"threshold_tokens = {plan.threshold_tokens}")
    return "\n".join([*lines, *([""] if plan.tie_share else []), *_tie_lines(plan)]) + "\n"


def _tie_lines(plan: DeployedPlan) -> list[str]:
    return [] if plan.tie_share is None else ["[gateway.routing]", f"tie_share = {plan.tie_share:.6g}"]


def helm_values(plan: DeployedPlan, cluster: DeployedCluster, engine: str) -> str:
    """Values of the chart for one cluster, as YAML. Lists replace those of other files: pools are whole."""
    roles = [(role, count) for role, count in _roles(cluster) if count]
    pools = [
        {
            "name": f"{cluster.name}-{role}" if len(plan.clusters) > 1 else role,
            "cluster": cluster.name,
            "clusterKind": str(cluster.kind),
            "role": role,
            "replicas": count,
            "engine": engine,
            "cacheBytes": cluster.cache_bytes,
        }
        for role, count in roles
    ]
    values: dict[str, Any] = {"pools": pools}
    if cluster.kind is ClusterKind.PRFAAS:
        values["gateway"] = {"enabled": False}
    elif plan.threshold_tokens is not None:
        values["gateway"] = {"thresholdTokens": plan.threshold_tokens}
        if tie := _tie_lines(plan):
            values["gateway"]["tables"] = "\n".join(tie) + "\n"
    head = (
        f"# Cluster {cluster.name} as planned. Give pools their `resources`, and what else `values.yaml` has for them."
    )
    return "\n".join([head, *_yaml(values, "")]) + "\n"


def _roles(cluster: DeployedCluster) -> Sequence[tuple[str, int]]:
    return (("prefill", cluster.num_prefill), ("decode", cluster.num_decode))


def _yaml(table: Mapping[str, Any], before: str) -> list[str]:
    """Tables and lists of tables in blocks; other values as in JSON, which is YAML, too."""
    lines: list[str] = []
    for key, value in table.items():
        match value:
            case dict():
                lines += [f"{before}{key}:", *_yaml(value, before + INDENT)]
            case [*rows]:
                lines.append(f"{before}{key}:" if rows else f"{before}{key}: []")
                for row in rows:
                    first, *rest = _yaml(row, before + INDENT * 2)
                    lines += [f"{before}{INDENT}- {first.strip()}", *rest]
            case _:
                lines.append(f"{before}{key}: {json.dumps(value)}")
    return lines


def init_command(plan: DeployedPlan, hosts: Mapping[str, Sequence[str]]) -> str:
    """The call that writes a file for each node: the first machines of a PD cluster prefill. Raises InputError."""
    machines: dict[str, list[str]] = {"remote": [], "prefill": [], "decode": []}
    for cluster in plan.clusters:
        wanted, there = cluster.num_prefill + cluster.num_decode, list(hosts.get(cluster.name, ()))
        if len(there) < wanted:
            raise InputError(
                f"--hosts {cluster.name}={','.join(there)}: {wanted} machines are planned, {len(there)} are named"
            )
        near, far = ("prefill", "decode") if cluster.kind is ClusterKind.PD else ("remote", "remote")
        machines[near] += there[: cluster.num_prefill]
        machines[far] += there[cluster.num_prefill : wanted]
    if sum(each.kind is ClusterKind.PD for each in plan.clusters) > 1:
        raise InputError("several PD clusters: prfaas init writes one at a time; use --as values")
    parts = [word for name, each in machines.items() for word in (f"--{name}", ",".join(each) or "-")]
    return join(["prfaas", "init", "site", "--model", "MODEL_DIR", *parts]) + "\n"

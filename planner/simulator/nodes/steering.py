"""The long timescale of a simulated system: what the controller says at every tick, carried out."""

from dataclasses import replace
from typing import Any

from planner.decisions.routing.policy import RoutingPolicy
from planner.decisions.views import ClusterKind
from planner.errors import InputError
from planner.simulator.nodes.roles import Roles
from planner.simulator.scenario import Scenario
from planner.solve.control.controller import Controller, ControllerConfig, HardwareModel, Observation


class Steering:
    """A controller at the helm. `offered` is told the uncached tokens and the answer of every request that comes."""

    def __init__(self, scenario: Scenario, config: ControllerConfig, roles: Roles) -> None:
        pds = [pool for pool in scenario.pools if pool.kind is ClusterKind.PD]
        if len(pds) > 1:
            raise InputError(f"controller: {len(pds)} PD clusters; it plans the split of one")
        self.tick_s = config.tick_s
        self.offered: list[tuple[float, float]] = []
        self.timeline: list[dict[str, Any]] = []
        self._roles = roles
        self._controller = Controller(config, _model_of(scenario))

    def steer(self, now: float, policy: RoutingPolicy) -> RoutingPolicy:
        """One tick: the policy from now on."""
        prefills, decodes = self._roles.ready_pd_prefills(), self._roles.ready_decodes()
        seen = Observation(
            at_s=now,
            uncached_tokens=[tokens for tokens, _ in self.offered],
            output_tokens=[output for _, output in self.offered],
            num_prefill=len(prefills),
            num_decode=len(decodes),
            threshold_tokens=policy.threshold_tokens,
            tie_share=policy.tie_share,
            prefill_loads=[float(node.num_jobs) for node in prefills],
            decode_loads=[node.assigned / node.profile.max_running for node in decodes],
            converting=self._roles.converting,
        )
        self.offered = []
        effects = self._controller.on_tick(seen)
        if effects.threshold_tokens is not None:
            tie_share = 1.0 if effects.tie_share is None else effects.tie_share
            policy = replace(policy, threshold_tokens=effects.threshold_tokens, tie_share=tie_share)
        if effects.convert is not None and self._roles.convert(now, effects.convert):
            self._controller.converted(now)
        self.timeline.append(
            {
                "at_s": now,
                "num_prefill": len(prefills),
                "num_decode": len(decodes),
                "threshold_tokens": policy.threshold_tokens,
                "offered": len(seen.uncached_tokens),
                "diagnosis": effects.diagnosis,
            }
        )
        return policy


def _model_of(scenario: Scenario) -> HardwareModel:
    pd = next(pool for pool in scenario.pools if pool.kind is ClusterKind.PD)
    prfaas = next((pool for pool in scenario.pools if pool.kind is ClusterKind.PRFAAS), None)
    assert pd.decode is not None
    return HardwareModel(
        local=pd.prefill,
        remote=prfaas.prefill if prfaas else pd.prefill,
        kv=scenario.kv,
        num_prfaas=prfaas.num_prefill if prfaas else 0,
        egress_bytes_per_s=sum(wire.capacity[0][1] for wire in scenario.wires),
        decode_s_per_token=pd.decode.full_step_s / pd.decode.max_running,
    )

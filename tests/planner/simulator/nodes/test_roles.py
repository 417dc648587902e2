"""Nodes that change their role: drained, flipped in the time that was measured, with their cache, or back in the old one."""

import numpy as np
import pytest

from planner.decisions.admission.classes import ServiceClass
from planner.decisions.admission.overload import AdmissionPolicy
from planner.decisions.views import ClusterKind
from planner.errors import InputError
from planner.model.profile import DecodeProfile, KvSize, PrefillCurve
from planner.simulator.gateway.door import Door
from planner.simulator.loop import Loop
from planner.simulator.nodes.caches import layout_of
from planner.simulator.nodes.node import SimulatedRequest
from planner.simulator.nodes.roles import Roles
from planner.simulator.scenario import FlipTimes, Pool
from planner.solve.control.controller import RoleMove
from tests.planner.simulator.systems import FOREVER, queue_of

POOL = Pool(
    name="pd", kind=ClusterKind.PD, num_prefill=2, num_decode=2, cache_bytes=1e6,
    prefill=PrefillCurve(coefficients=(0.0, 1e-3, 0.0), valid_tokens=(0, FOREVER)),
    decode=DecodeProfile(max_running=4, step_s=0.01),
)  # fmt: skip
STEADY = FlipTimes(median_s=0.03, p90_s=0.03)
HASHES = tuple(bytes([index]) * 32 for index in range(4))


def roles_of(loop: Loop, flips: FlipTimes = STEADY, seed: int = 0, pool: Pool = POOL) -> Roles:
    def ignored(now: float, job: SimulatedRequest) -> None:
        return

    return Roles(
        queue_of(1, pools=[pool], flips=flips), layout_of(KvSize(bytes_per_token=1), 16), loop, seed,
        on_start=ignored, on_prefilled=ignored, on_first_token=ignored, on_decoded=ignored,
    )  # fmt: skip


def names(roles: Roles) -> tuple[list[str], list[str]]:
    return list(roles.prefills), list(roles.decodes)


def test_a_node_keeps_its_name_and_its_cache_and_is_left_out_meanwhile():
    loop = Loop()
    roles = roles_of(loop)
    cache = roles.prefills["pd-p0"].cache
    cache.begin("r", HASHES, 64, 0.0)
    cache.end("r", 64, 0.0)
    assert roles.convert(0.0, RoleMove.TO_DECODE)
    job = SimulatedRequest(0, 0.0, 64, 1.0, HASHES)
    assert [node.node_id for node in roles.seen_by(job, 0.0).prefills["pd"]] == ["pd-p1"]
    assert roles.converting == 1
    loop.run()
    assert names(roles) == (["pd-p1"], ["pd-d0", "pd-d1", "pd-p0"])
    assert loop.now == pytest.approx(0.03)
    assert roles.decodes["pd-p0"].match(HASHES, 64).num_tokens == 64
    assert (roles.converting, roles.conversions) == (0, {"converted": 1})
    assert roles.convert(loop.now, RoleMove.TO_PREFILL)
    loop.run()
    assert len(roles.decodes) == 2


def test_it_ends_what_it_decodes_first_and_gets_nothing_new():
    loop = Loop()
    roles = roles_of(loop)
    for node, tokens in zip(roles.decodes.values(), (300.0, 200.0), strict=True):
        node.assign(1)
        node.put(0.0, SimulatedRequest(0, 0.0, 10, tokens, ()))
    busy = roles.decodes["pd-d1"]
    busy.assign(1)
    busy.put(0.0, SimulatedRequest(0, 0.0, 10, 100.0, ()))
    assert roles.convert(0.0, RoleMove.TO_PREFILL)  # the node with the least to do
    assert [node.node_id for node in roles.ready_decodes()] == ["pd-d1"]
    loop.run()
    assert names(roles)[0] == ["pd-p0", "pd-p1", "pd-d0"]
    assert loop.now == pytest.approx(3.0 + 0.03, abs=0.011)


@pytest.mark.parametrize(
    ("flips", "outcome"),
    [
        (FlipTimes(failing=1.0), "verify_failed"),
        (FlipTimes(drain_timeout_s=1.0), "drain_timeout"),
    ],
)
def test_what_fails_leaves_the_node_in_its_old_role_and_in_use(flips: FlipTimes, outcome: str):
    loop = Loop()
    roles = roles_of(loop, flips)
    if outcome == "drain_timeout":
        for node in roles.decodes.values():
            node.assign(1)
            node.put(0.0, SimulatedRequest(0, 0.0, 10, 1e4, ()))
    assert roles.convert(0.0, RoleMove.TO_PREFILL)
    loop.run()
    assert names(roles) == (["pd-p0", "pd-p1"], ["pd-d0", "pd-d1"])
    assert len(roles.ready_decodes()) == 2
    assert roles.conversions == {outcome: 1}


def test_the_last_node_of_a_role_is_left_alone():
    loop = Loop()
    roles = roles_of(loop)
    assert roles.convert(0.0, RoleMove.TO_DECODE)
    assert not roles.convert(0.0, RoleMove.TO_DECODE)
    assert len(roles.prefills) == 2


def test_the_door_counts_the_room_of_the_nodes_there_are():
    service, loop = ServiceClass(tbt_s=0.1), Loop()
    roles = roles_of(loop)
    door = Door(
        AdmissionPolicy.EARLY, {service: 1.0}, None, roles.decodes, loop, consider=lambda now, job: None,
        refuse=lambda now, job, why: None, decode_s=1.0, draws=np.zeros(1),
    )  # fmt: skip
    roles.on_changed = door.count_room
    assert door.rooms == {service: 8}
    assert roles.convert(0.0, RoleMove.TO_PREFILL)
    assert door.rooms == {service: 4}
    loop.run()
    assert roles.convert(loop.now, RoleMove.TO_DECODE)
    loop.run()
    assert door.rooms == {service: 8}


def test_flips_take_what_was_measured():
    def flip_s(seed: int) -> float:
        loop = Loop()
        assert roles_of(loop, FlipTimes(), seed).convert(0.0, RoleMove.TO_DECODE)
        loop.run()
        return loop.now

    taken = [flip_s(seed) for seed in range(300)]
    assert np.median(taken) == pytest.approx(0.027, rel=0.15)
    assert np.quantile(taken, 0.9) == pytest.approx(0.064, rel=0.2)
    assert max(taken) < 0.5


def test_times_that_cannot_be_are_refused():
    with pytest.raises(InputError, match="median_s=2"):
        FlipTimes(median_s=2.0, p90_s=1.0)
    with pytest.raises(InputError, match="failing"):
        FlipTimes(failing=2.0)

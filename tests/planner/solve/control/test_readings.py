"""Several gateways, one observation; nothing counted twice, nothing lost between two looks."""

import pytest

from planner.decisions.plans.live_plan import PlanSetting
from planner.decisions.plans.offered import GatewayLoad, LinkReport, NodeReport, SampleRing, Samples
from planner.decisions.views import ClusterKind, Role
from planner.solve.control.readings import Readings, Units, quietest

NOW = PlanSetting(threshold_tokens=1000.0)


class Told:
    """A gateway, as it would answer."""

    def __init__(self, boot: str = "a", limit: int = 100) -> None:
        self.boot, self.uncached, self.outputs = boot, SampleRing(limit), SampleRing(limit)

    def ask(self, *lengths: int, output: int = 10) -> None:
        for length in lengths:
            self.uncached.add(length)
            self.outputs.add(output)

    def answer(self, query: dict[str, str], **fields) -> GatewayLoad:
        known = query["boot"] == self.boot
        return GatewayLoad(
            boot=self.boot,
            uncached=self.uncached.after(int(query["uncached"]) if known else 0),
            outputs=self.outputs.after(int(query["outputs"]) if known else 0),
            **{"threshold_tokens": 1000.0} | fields,
        )


def look(readings: Readings, **gateways: Told):
    for name, gateway in gateways.items():
        readings.heard(name, gateway.answer(readings.query(name)))


def node(node_id: str, role: str = "prefill", kind: str = "pd", **fields) -> NodeReport:
    defaults = {"agent": "h:1", "cluster": kind, "state": "ready"}
    return NodeReport(node_id=node_id, role=Role(role), kind=ClusterKind(kind), **defaults | fields)


def test_what_was_asked_before_anybody_listened_is_not_new():
    readings, gateway = Readings(), Told()
    gateway.ask(1, 2, 3)
    look(readings, g=gateway)
    assert readings.observe(0.0, NOW)[0].uncached_tokens == []
    gateway.ask(4, 5)
    look(readings, g=gateway)
    observation, seen = readings.observe(10.0, NOW)
    assert observation.uncached_tokens == [4, 5]
    assert observation.output_tokens == [10, 10]
    assert seen.offered_req_per_s == 0.2
    assert seen.mean_uncached_tokens == 4.5


def test_a_gateway_that_starts_again_loses_nothing():
    readings, first = Readings(), Told("a")
    look(readings, g=first)
    first.ask(1)
    look(readings, g=first)
    second = Told("b")
    second.ask(2, 3)
    look(readings, g=second)
    assert readings.observe(1.0, NOW)[0].uncached_tokens == [1, 2, 3]


def test_workers_behind_one_address_are_told_apart():
    readings, one, other = Readings(), Told("a"), Told("b")
    look(readings, g=one)
    other.ask(5)
    look(readings, g=other)
    look(readings, g=one)
    other.ask(6)
    one.ask(7)
    look(readings, g=other)
    look(readings, g=one)
    look(readings, g=other)
    assert readings.observe(1.0, NOW)[0].uncached_tokens == [5, 6, 7]


def test_several_gateways_add_up_and_share_their_nodes():
    readings, one, other = Readings(), Told("a"), Told("b")
    look(readings, g=one, h=other)
    one.ask(1)
    other.ask(2)
    nodes = (node("p0", running=2), node("d0", "decode", running=3, waiting=1, slots=8), node("r0", kind="prfaas"))
    readings.heard("g", one.answer(readings.query("g"), nodes=(node("p0", state="down"), *nodes[1:])))
    readings.heard("h", other.answer(readings.query("h"), nodes=nodes))
    observation, seen = readings.observe(1.0, NOW)
    assert observation.uncached_tokens == [1, 2]
    assert (observation.num_prefill, observation.num_decode, observation.num_prfaas) == (1, 1, 1)
    assert observation.prefill_loads == [2.0]
    assert observation.decode_loads == [0.5]
    assert seen.roles == {"p0": "prefill", "d0": "decode"}
    assert seen.gateways == 2


def test_nodes_on_their_way_are_of_no_role():
    readings, gateway = Readings(), Told()
    nodes = (node("p0"), node("d0", "decode", state="converting"), node("d1", "decode"))
    readings.heard("g", gateway.answer(readings.query("g"), nodes=nodes))
    observation, _ = readings.observe(1.0, NOW)
    assert (observation.num_prefill, observation.num_decode, observation.converting) == (1, 1, 1)


@pytest.mark.parametrize(
    ("fields", "believed"),
    [
        ({}, None),
        ({"utilisation": 0.9}, 1e9),
        ({"congested": True}, 1e9),
        ({"congested": True, "up": False}, None),
        ({"congested": True, "rate_bytes_per_s": None}, None),
    ],
)
def test_a_link_is_believed_while_it_is_full(fields, believed):
    readings, gateway = Readings(), Told()
    link = LinkReport(**{"source": "east", "destination": "west", "rate_bytes_per_s": 1e9} | fields)
    for name in ("g", "h"):  # the same link, seen twice
        readings.heard(name, gateway.answer(readings.query(name), links=(link,)))
    assert readings.observe(1.0, NOW)[0].egress_bytes_per_s == believed


def test_a_smaller_scale_is_put_right():
    units = Units(time=0.2, tokens=1 / 64, bytes=0.001)
    readings, gateway = Readings(units), Told()
    look(readings, g=gateway)
    gateway.ask(304, output=16)
    look(readings, g=gateway)
    observation, seen = readings.observe(1.0, PlanSetting(threshold_tokens=304.0))
    assert observation.uncached_tokens == [19_456]
    assert observation.threshold_tokens == 19_456
    assert observation.output_tokens == [1024]
    assert seen.mean_uncached_tokens == 304
    assert units.threshold(19_400, 1.0) == 303
    assert units.bytes_per_s(62.5e6) == pytest.approx(12.5e9)
    with pytest.raises(ValueError, match="scale"):
        Units(time=0.0)


def test_the_quietest_node_is_converted_and_stays_chosen():
    nodes = [node("p0", running=3), node("p1", running=1), node("p2", state="down"), node("r0", kind="prfaas")]
    assert quietest(nodes, Role.PREFILL, {}).node_id == "p1"
    assert quietest(nodes, Role.PREFILL, {"p0": Role.DECODE}).node_id == "p0"
    assert quietest(nodes, Role.DECODE, {}) is None


def test_an_answer_that_cannot_be_is_cut():
    readings = Readings()
    readings.query("g")
    samples = Samples(values=(1, 2), last_seq=2)
    for seq in (2, 1000):
        told = GatewayLoad(boot="a", uncached=Samples(values=(1,), last_seq=seq), outputs=samples, threshold_tokens=1.0)
        readings.heard("g", told)
    assert readings.observe(1.0, NOW)[0].uncached_tokens == [1]


def test_of_what_nobody_observes_only_the_latest_is_kept():
    readings, gateway = Readings(max_samples=3), Told()
    look(readings, g=gateway)
    for length in (1, 2, 3, 4):
        gateway.ask(length, output=length)
        look(readings, g=gateway)
    observation, _ = readings.observe(1.0, NOW)
    assert observation.uncached_tokens == observation.output_tokens == [2, 3, 4]

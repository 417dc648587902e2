"""What is made of what nodes answered."""

from dataclasses import replace

from gateway.cluster.agent_values import LinkLoad, NodeInfo, NodeLoad
from gateway.config.models import ModelCatalog, ModelTable
from membership.lines import Line
from prfaas.commands.checking.findings import (
    Certificate,
    CheckFindings,
    Described,
    Finding,
    Level,
    PortFinding,
    Silent,
    WayFinding,
    findings,
    worst,
)

INFO = NodeInfo(
    node_id="d0",
    cluster="west",
    cluster_kind="pd",
    role="decode",
    state="ready",
    engine_url="http://127.0.0.1:1",
    model_id="m",
    layout_json="{}",
    layout_fingerprint="f" * 64,
    max_model_len=4096,
    boot_id="b",
    version="1.0",
)
DECODE = Described(address="127.0.0.1:7003", info=INFO, load=NodeLoad(), took_s=0.002, ahead_s=0.0)
PREFILL = replace(DECODE, address="127.0.0.1:7001", info=replace(INFO, node_id="p0", role="prefill"))
WELL = CheckFindings(described=(PREFILL, DECODE), ways=(WayFinding("p0", "d0", 0.004, ""),), version="1.0")


def bad(seen: CheckFindings) -> list[Finding]:
    return [each for each in findings(seen) if each.level is not Level.OK]


def with_decode(**changes: object) -> CheckFindings:
    info = replace(INFO, **changes)  # type: ignore[arg-type]
    return replace(WELL, described=(PREFILL, replace(DECODE, info=info)))


def test_nothing_is_said_against_a_system_that_is_well() -> None:
    assert bad(WELL) == []
    assert worst(findings(WELL)) is Level.OK
    assert worst([]) is Level.OK


def test_an_engine_in_clear_is_an_error_to_a_gateway_with_certificates() -> None:
    seen = with_decode(engine_url="http://10.0.0.2:7201")
    assert bad(seen) == []
    (found,) = bad(replace(seen, has_identity=True))
    assert (found.level, found.about) == (Level.ERROR, "d0")
    assert "http://10.0.0.2:7201 is in clear" in found.what
    assert bad(replace(WELL, has_identity=True)) == []


def test_an_arena_that_peers_write_into_is_a_warning() -> None:
    (found,) = bad(with_decode(rdma_direct=True))
    assert (found.level, found.about) == (Level.WARNING, "d0")
    assert found.what == "the NICs of the nodes of west can write anywhere in its arena"
    assert found.remedy == "rdma_direct = false gives each a buffer of its own"


def test_a_control_port_that_takes_tls_1_2_is_a_warning() -> None:
    (found,) = bad(replace(WELL, certificates=(Certificate("certificate of n", 1e8, is_old_taken=True),)))
    assert (found.level, found.what) == (Level.WARNING, "its control_port takes TLS 1.2")


def test_who_does_not_answer_is_an_error_with_its_reason() -> None:
    (found,) = bad(replace(WELL, silent=(Silent("10.0.0.9:7001", "unreachable", "refused"),)))
    assert (found.level, found.about) == (Level.ERROR, "10.0.0.9:7001")
    assert found.what == "no answer: unreachable (refused)"
    assert "control_port" in found.remedy


def test_a_gateway_without_decode_nodes_serves_nothing() -> None:
    (found,) = bad(replace(WELL, described=(PREFILL,)))
    assert (found.level, found.about) == (Level.ERROR, "roles")
    (found,) = bad(replace(WELL, described=(DECODE,)))
    assert (found.level, found.about) == (Level.WARNING, "roles")


def test_states_are_explained_and_those_of_later_versions_are_no_error() -> None:
    assert [each.about for each in bad(with_decode(state="engine_down")) if each.level is Level.ERROR] == [
        "d0",
        "roles",
    ]
    assert [each.level for each in bad(with_decode(state="dreaming"))] == [Level.WARNING]


def test_nodes_of_one_name_are_told_apart_by_nobody() -> None:
    (found,) = bad(with_decode(node_id="p0"))
    assert (found.level, found.about) == (Level.ERROR, "p0")


def test_who_has_another_layout_is_named() -> None:
    third = replace(DECODE, info=replace(INFO, node_id="d1", layout_fingerprint="0" * 64))
    (found,) = bad(replace(WELL, described=(PREFILL, DECODE, third)))
    assert (found.level, found.about) == (Level.ERROR, "d1")


def test_nodes_of_several_models_exchange_nothing_and_need_not() -> None:
    catalog = ModelCatalog((ModelTable(name="m"), ModelTable(name="n")))
    others = [
        replace(
            each, info=replace(each.info, node_id=f"n-{each.info.node_id}", model_id="n", layout_fingerprint="0" * 64)
        )
        for each in (PREFILL, DECODE)
    ]
    assert not bad(replace(WELL, described=(PREFILL, DECODE, *others), catalog=catalog))
    (missing,) = bad(replace(WELL, catalog=catalog))
    assert (missing.level, missing.about) == (Level.WARNING, "model n")
    (stranger,) = bad(
        replace(WELL, described=(PREFILL, DECODE, others[1]), catalog=ModelCatalog((ModelTable(name="m"),)))
    )
    assert (stranger.about, "'n'" in stranger.what) == ("n-d0", True)


def test_versions_and_lengths_that_differ_are_warnings() -> None:
    (found,) = bad(with_decode(version=""))
    assert (found.level, found.what) == (Level.WARNING, "runs version unknown, this is 1.0")
    (found,) = bad(with_decode(max_model_len=2048))
    assert found.what == "max_model_len differs: 2048, 4096"


def test_a_clock_is_wrong_only_by_what_is_sure() -> None:
    def seen(ahead_s: float, took_s: float) -> list[Finding]:
        return bad(replace(WELL, described=(PREFILL, replace(DECODE, ahead_s=ahead_s, took_s=took_s))))

    assert [each.level for each in seen(-2.0, 0.01)] == [Level.WARNING]
    assert [each.level for each in seen(90.0, 0.01)] == [Level.ERROR]
    assert "behind" in seen(-2.0, 0.01)[0].what
    assert seen(2.0, 4.0) == []  # the answer was on its way for as long


def test_a_closed_engine_port_is_worse_than_others() -> None:
    ports = [
        PortFinding("d0", name, "h:1", "Connection refused") for name in ("engine_port", "calls_port", "bootstrap_port")
    ]
    assert [each.level for each in bad(replace(WELL, ports=ports))] == [Level.ERROR, Level.WARNING, Level.WARNING]


def test_a_way_without_an_answer_is_named_by_both_its_ends() -> None:
    (found,) = bad(replace(WELL, ways=(WayFinding("p0", "d0", 0.1, "path_failed"),)))
    assert (found.level, found.about) == (Level.ERROR, "p0 -> d0")


def test_certificates_are_told_before_they_end() -> None:
    days = 86400.0
    seen = replace(
        WELL,
        certificates=[
            Certificate("a", 300 * days),
            Certificate("b", 3 * days),
            Certificate("c", -1.0),
            Certificate("d", None, "cannot be read: gone"),
        ],
    )
    assert [(each.about, each.level) for each in bad(seen)] == [
        ("b", Level.WARNING),
        ("c", Level.ERROR),
        ("d", Level.ERROR),
    ]


def test_links_to_other_clusters_say_what_they_have_carried() -> None:
    link = LinkLoad(
        peer="west", available_bytes_per_s=1.25e9, utilisation=0.1, retransmit_ratio=0.02, rtt_s=0.03, min_rtt_s=0.03,
        congested=False, queued_bytes=0, estimate_error=0.0, budget_bytes_per_s=2.5e9,
    )  # fmt: skip
    load = NodeLoad(links=(link, replace(link, peer="east", available_bytes_per_s=0.0)))
    far = replace(PREFILL, info=replace(PREFILL.info, cluster="east", cluster_kind="prfaas"), load=load)
    said = [each.what for each in findings(replace(WELL, described=(far, DECODE))) if each.about == "p0 -> west"]
    assert said == ["gives 10.00 Gbit/s to who is busy, RTT 30.0 ms, budget 20.00 Gbit/s"]
    load = NodeLoad(links=(replace(link, congested=True),))
    (found,) = bad(replace(WELL, described=(replace(far, load=load), DECODE)))
    assert found.what.startswith("congested: 2.00% retransmitted")


def test_budgets_of_a_line_are_those_that_it_has() -> None:
    line = Line(source="east", destination="west", name="a", capacity_gbps=20, shared_gbps=4)
    far = replace(PREFILL, info=replace(PREFILL.info, cluster="east", cluster_kind="prfaas"))

    def said(**budgets: float) -> list[tuple[Level, str]]:
        sender = replace(far, load=NodeLoad(budgets=budgets))
        seen = replace(WELL, described=(sender, sender, DECODE), lines=(line,))
        return [(each.level, each.what) for each in findings(seen) if each.about == "line a"]

    assert said(west=1e9) == [(Level.OK, "16.00 Gbit/s is ours, nodes may send 16.00 Gbit/s")]
    assert said(west=2e9) == [(Level.WARNING, "nodes of east may send 32.00 Gbit/s, and only 16.00 Gbit/s is ours")]
    assert said() == [(Level.WARNING, "carries 16.00 Gbit/s of ours, and a node of east has no egress budget for it")]
    wrong = replace(line, source="west", destination="east")
    seen = replace(WELL, described=(far, DECODE), lines=(wrong,))
    found = next(each for each in findings(seen) if each.level is Level.ERROR)
    assert "a line goes from a prfaas cluster to a pd one" in found.what


def test_a_system_whose_only_decode_node_is_drained_serves_nothing() -> None:
    for state in ("draining", "starting", "converting", "engine_down", "engine_silent"):
        found = bad(with_decode(state=state))
        assert worst(found) is Level.ERROR
        (roles,) = (each for each in found if each.about == "roles")
        assert roles.what == f"no decode node is ready (d0 {state}): every request is refused (no_decode_node)"
    other = replace(DECODE, info=replace(INFO, node_id="d1"))
    drained = with_decode(state="draining")
    assert worst(findings(replace(drained, described=(*drained.described, other)))) is Level.WARNING
    prefill = replace(PREFILL, info=replace(PREFILL.info, state="draining"))
    assert "no prefill node is ready (p0 draining)" in str(bad(replace(WELL, described=(prefill, DECODE))))


def test_other_code_of_the_same_version_is_told() -> None:
    (found,) = bad(replace(with_decode(version="1.0+1111111111"), version="1.0+2222222222", described=(
        replace(PREFILL, info=replace(PREFILL.info, version="1.0+2222222222")),
        replace(DECODE, info=replace(INFO, version="1.0+1111111111")),
    )))  # fmt: skip
    assert (found.level, found.about) == (Level.WARNING, "d0")
    assert found.what == "runs version 1.0+1111111111, this is 1.0+2222222222 (other code of the same version)"


def test_nodes_and_gateway_name_blocks_by_the_same_secrets() -> None:
    assert bad(replace(WELL, name_secrets=())) == []
    both = replace(
        WELL,
        described=tuple(
            replace(each, info=replace(each.info, name_secrets=("new", "old"))) for each in (PREFILL, DECODE)
        ),
    )
    assert bad(replace(both, name_secrets=("new", "old"))) == []
    assert "names" in {each.about for each in findings(replace(both, name_secrets=("new", "old")))}
    (unkeyed, behind) = bad(replace(with_decode(name_secrets=("old",)), name_secrets=("new", "old")))
    assert (unkeyed.level, unkeyed.about, behind.about) == (Level.WARNING, "p0", "d0")
    assert "by no secret, and the gateway by new" in unkeyed.what
    embedded = replace(
        WELL, described=tuple(replace(each, info=replace(each.info, has_own_cache=False)) for each in (PREFILL, DECODE))
    )
    assert bad(replace(embedded, name_secrets=("new",))) == []
    (other,) = bad(with_decode(name_secrets=("new",)))
    assert "by new, which this gateway's names_secret does not have" in other.what


def test_the_earlier_secret_can_go_when_the_overlap_is_over_and_no_node_is_behind() -> None:
    nodes = tuple(replace(each, info=replace(each.info, name_secrets=("new", "old"))) for each in (PREFILL, DECODE))
    both = replace(WELL, described=nodes, name_secrets=("new", "old"))
    assert "by old, too, for 2.0 more hours" in {each.what for each in findings(replace(both, names_left_s=7200.0))}
    (over,) = bad(replace(both, names_left_s=0.0))
    assert (over.level, over.about) == (Level.WARNING, "names")
    assert over.what == "by old are not looked for any more"
    behind = replace(both, described=(nodes[0], replace(DECODE, info=replace(INFO, name_secrets=("old",)))))
    assert [each.about for each in bad(replace(behind, names_left_s=0.0))] == ["d0"]

from dataclasses import replace

from gateway.cluster.agent_values import NodeInfo, info_from
from gateway.cluster.served_model import (
    MOST_REVISIONS,
    ServedModel,
    hashing_by,
    revision_of,
    revisions_among,
    short,
    why_not,
)
from hybrid_cache.hashing.name_secrets import UNKEYED
from hybrid_cache.layout.layout import ModelLayout
from tests.gateway.layouts import LAYOUT
from transport.control.proto import node_pb2 as pb

WIDER = replace(LAYOUT, block_size=32)
RETRAINED = replace(LAYOUT, model="retrained")
LAYOUTS = {layout.fingerprint: layout for layout in (LAYOUT, WIDER, RETRAINED)}


def info(layout: ModelLayout, role: str = "decode", **fields: object) -> NodeInfo:
    described = pb.NodeDescription(
        role=role,
        model_id="tiny",
        layout_json=layout.to_json(),
        layout_fingerprint=layout.fingerprint,
        max_model_len=4096,
    )
    return replace(info_from(described), **fields)


def named(info: NodeInfo, layout: ModelLayout) -> ServedModel:
    return ServedModel(
        "tiny", info.model_id, layout, info.max_model_len, hashing_by(UNKEYED, layout), is_paired=info.rooms is not None
    )


def among(*infos: NodeInfo, former: str = "", accepted: tuple[str, ...] = ()) -> list[str]:
    return list(revisions_among(infos, LAYOUTS, former, accepted, named))


def test_the_first_revision_stands_for_the_model_while_a_node_has_it() -> None:
    assert among(info(LAYOUT), info(WIDER)) == [LAYOUT.fingerprint, WIDER.fingerprint]
    assert among(info(LAYOUT), info(WIDER), former=WIDER.fingerprint) == [WIDER.fingerprint, LAYOUT.fingerprint]
    assert among(info(LAYOUT), former=WIDER.fingerprint) == [LAYOUT.fingerprint]
    assert among(info(LAYOUT, layout_json="")) == []


def test_other_weights_need_a_word_of_the_operator() -> None:
    both = info(LAYOUT), info(RETRAINED)
    assert among(*both) == [LAYOUT.fingerprint]
    assert among(*both, accepted=("retrained",)) == [LAYOUT.fingerprint]
    assert among(*both, accepted=("retrained", "scripted")) == [LAYOUT.fingerprint, RETRAINED.fingerprint]


def test_revisions_are_so_many_at_most_and_those_of_most_nodes() -> None:
    many = [replace(LAYOUT, block_size=16 * (2 + number)) for number in range(40)]
    layouts = LAYOUTS | {layout.fingerprint: layout for layout in many}
    infos = [info(LAYOUT), *map(info, many), info(many[30])]
    found = revisions_among(infos, layouts, LAYOUT.fingerprint, (), named)
    assert len(found) == MOST_REVISIONS
    assert list(found)[:2] == [LAYOUT.fingerprint, many[30].fingerprint]
    again = revisions_among(infos[::-1], layouts, LAYOUT.fingerprint, (), named)
    assert list(again) == list(found)
    assert "8" in why_not(infos[0], "", found)


def test_each_revision_is_as_long_as_its_own_nodes_take() -> None:
    found = revisions_among([info(LAYOUT), info(WIDER, max_model_len=99)], LAYOUTS, "", (), named)
    assert [each.max_model_len for each in found.values()] == [4096, 99]


def test_a_prompt_is_read_with_names_for_all_revisions() -> None:
    found = list(revisions_among([info(LAYOUT), info(WIDER, model_id="tiny-2")], LAYOUTS, "", (), named).values())
    model = found[0].as_read("acme", others=found[1:])
    assert (model.revision, [name for name, _ in model.others]) == (LAYOUT.fingerprint, [WIDER.fingerprint])
    assert [hashing.group for _, hashing in model.others] == ["acme"]
    assert model.names == ("tiny", "tiny", "tiny-2")
    assert short(revision_of(info(WIDER))) == WIDER.fingerprint[:12]

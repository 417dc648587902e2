"""Drafts: which layers are theirs, what is refused, and what their KVCache is called by."""

from types import SimpleNamespace
from typing import Any

import pytest

from engine.vllm.drafts import check_drafts, draft_facts, draft_layers
from hybrid_cache.errors import LayoutError
from tests.engine.vllm.builders import full, state


def config(method: str = "eagle", *, replay: bool = False, **draft: Any) -> Any:
    fields = {"model": "draft", "model_weights": "", "revision": "a" * 40, "hf_config": {"layers": 1}, "dtype": "bf16"}
    return SimpleNamespace(
        cache_config=SimpleNamespace(use_replayssm=replay),
        model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: 4),
        speculative_config=SimpleNamespace(method=method, draft_model_config=SimpleNamespace(**fields | draft)),
    )


PLAIN = SimpleNamespace(speculative_config=None)


def test_a_drafts_layers_are_numbered_behind_the_targets_or_have_a_model_of_their_own() -> None:
    names = [
        "model.layers.0.attn",
        "model.layers.3.attn",
        "model.layers.4.attn",
        "draft_model.model.layers.0.attn",
        "mtp.layers.0.self_attn.attn",
        "model.mtp.layers.0.self_attn.attn",
        "model.eagle_layers.4.self_attn.attn",
        "a",
        "model.layers.1.mtp_gate.attn",
    ]
    assert draft_layers(config(), names) == set(names[2:7])
    assert draft_layers(PLAIN, names) == frozenset()


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "draft_model", "ngram"])
def test_drafts_are_taken_with_and_without_recurrent_states(method: str) -> None:
    check_drafts(config(method), [full("a")])
    check_drafts(config(method), [full("a"), state("s")])
    check_drafts(PLAIN, [full("a"), state("s")])


def test_other_drafts_are_refused() -> None:
    with pytest.raises(LayoutError, match="dflash"):
        check_drafts(config("dflash"), [full("a")])
    with pytest.raises(LayoutError, match=r"s: .*--use-replayssm"):
        check_drafts(config(replay=True), [full("a"), state("s")])
    with pytest.raises(LayoutError, match=r"s: .*without VLLM_SSM_CONV_STATE_LAYOUT"):
        check_drafts(config(), [full("a"), state("s")], columns_first=False)
    check_drafts(config(replay=True), [full("a")], columns_first=False)
    with pytest.raises(LayoutError, match=r"draft_model\.layers\.0\.mixer: a draft with recurrent states"):
        check_drafts(config("draft_model"), [state("model.layers.0.mixer"), state("draft_model.layers.0.mixer")])


def test_a_draft_is_called_by_its_weights_and_its_configuration() -> None:
    facts = [
        draft_facts(each, None)
        for each in (
            config(),
            config(revision="b" * 40),
            config(hf_config={"layers": 2}),
            config("eagle3"),
            config(dtype="f"),
        )
    ]
    assert len({str(sorted(each.items())) for each in facts}) == len(facts)
    assert draft_facts(PLAIN, None) == draft_facts(config("ngram"), None) == {}
    with pytest.raises(LayoutError, match="which weights"):
        draft_facts(config(revision="main"), None)

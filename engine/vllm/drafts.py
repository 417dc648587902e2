"""Speculative decoding: which layers are a draft's, what their KVCache depends on, and which drafts are refused.

A draft is computed after a step has sampled, several times over, and its entry for a token may depend on the token after
it. So its layers are saved at the end of a step. The last entry of a leg follows from the token that the leg sampled, not
from the prompt's last. (vLLM's own at the end of each chunk follows from the last token of the prompt.) vLLM verifies each
draft, so that costs a draft at most, never a token.

Recurrent states are handed over as a server without drafts has them (`engine.vllm.specs`), so the numbers of drafts may differ.
"""

import re
from collections.abc import Iterable
from typing import Any, Final

from engine.agent.identity import DigestMemory
from engine.vllm.identity import kv_identity, text_of
from engine.vllm.layout import CacheLayer, LayerKind
from hybrid_cache.errors import LayoutError

WITHOUT_CACHE: Final = frozenset({"ngram"})
WITH_CACHE: Final = frozenset({"draft_model", "eagle", "eagle3", "mtp"})
# How a draft's layers are called that are counted apart from the target's: "mtp" is inside of MiMo V2's names, and MiniCPM's
# heads have a word of their own.
_OWN: Final = re.compile(r"(?:^|\.)(?:draft_model|mtp|eagle_layers)\.")
_NUMBER: Final = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")


def check_drafts(vllm_config: Any, layers: Iterable[CacheLayer], *, columns_first: bool = True) -> None:
    """Raises LayoutError for drafts that KVCache of prompts cannot be handed over with.

    `columns_first`: whether convolutions keep their states column by column, so that those of drafts are apart.
    """
    speculation = vllm_config.speculative_config
    if speculation is None:
        return
    if speculation.method not in WITHOUT_CACHE | WITH_CACHE:
        raise LayoutError(f"speculative decoding by {speculation.method!r} has not been tried with this connector")
    found = [layer.name for layer in layers if layer.kind is LayerKind.STATE]
    if not found:
        return
    states = found[0]
    if own := draft_layers(vllm_config, found):
        raise LayoutError(f"{min(own)}: a draft with recurrent states of its own cannot be handed over")
    if vllm_config.cache_config.use_replayssm:
        raise LayoutError(f"{states}: with speculative decoding and --use-replayssm a state is not whole in any block")
    if not columns_first:
        raise LayoutError(
            f"{states}: with speculative decoding states are handed over in the layout SD alone: "
            "start the nodes without VLLM_SSM_CONV_STATE_LAYOUT"
        )


def draft_layers(vllm_config: Any, names: Iterable[str]) -> frozenset[str]:
    """The layers of a rank that are a draft's: of a model of its own, or numbered behind the target's."""
    if vllm_config.speculative_config is None:
        return frozenset()
    target = vllm_config.model_config.get_total_num_hidden_layers()
    return frozenset(
        name
        for name in names
        if _OWN.search(name) or ((found := _NUMBER.search(name)) is not None and int(found[1]) >= target)
    )


def draft_facts(vllm_config: Any, memory: DigestMemory | None) -> dict[str, str]:
    """What the KVCache of a draft depends on, by name. Raises LayoutError where its weights cannot be told apart."""
    speculation = vllm_config.speculative_config
    if speculation is None or speculation.method in WITHOUT_CACHE:
        return {}
    model = speculation.draft_model_config
    commit = getattr(model.hf_config, "_commit_hash", None) or model.revision or ""
    return {
        "draft.method": str(speculation.method),
        "draft.model": kv_identity(str(model.model_weights or model.model), str(commit), {}, memory=memory),
        "draft.config": text_of(model.hf_config),
        "draft.dtype": str(model.dtype),
    }

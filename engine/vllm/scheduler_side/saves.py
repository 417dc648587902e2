"""Works out what a step of vLLM adds to a request's pages."""

from collections.abc import Sequence

from engine.vllm.layout import NULL_BLOCK, LayerKind, LayerPlace, Table, VllmLayout, state_block, unfilled
from engine.vllm.scheduler_side.handover import Handover, HandoverPhase
from engine.vllm.scheduler_side.steps import SaveBlocks, StateOffer


def begin_computing(handover: Handover, now: float) -> None:
    """What is cached is there: from here on the request's own tokens are saved."""
    assert handover.pages is not None
    handover.phase = HandoverPhase.COMPUTING
    handover.computing_s = now
    handover.saved_tokens = handover.pages.cached_tokens
    handover.unsaved_states = {
        (group, length)
        for group, lengths in enumerate(handover.pages.states)
        for length in lengths
        if length > handover.pages.cached_tokens
    }


def step_save(
    layout: VllmLayout,
    handover: Handover,
    num_tokens: int,
    tables: Sequence[Table],
    offers: Sequence[StateOffer] = (),
    drafted: int = 0,
) -> SaveBlocks | None:
    """The save of a step that computes `num_tokens` tokens of a request, None if it adds nothing; notes it as saved.

    `tables`: block ids of the request by the end of the step, one table per group of vLLM. `offers`: states that the step
    leaves behind on its way. `drafted`: how many of the tokens, the last ones, are drafts: they are no part of the prompt.
    """
    assert handover.pages is not None
    before = handover.request.num_computed_tokens
    if handover.computed_from is None:
        handover.computed_from = before
    after = before + num_tokens - drafted
    start, stop = handover.saved_tokens, min(after, handover.pages.num_tokens)
    if stop <= start:  # preempted, and computed once more
        return None
    offers = [offer for offer in offers if offer.length <= after]
    if drafted:
        offers += _before_drafts(layout, before, after, drafted, tables)
    lengths = _states_at(layout, before, after, handover, tables, offers, is_drafted=drafted > 0)
    handover.unfilled_windows |= unfilled(layout, handover.pages, tables, start, stop)
    handover.saved_tokens = stop
    wanted = tuple(offer for offer in offers if offer.length in lengths)
    is_drafted = drafted > 0 and after in lengths
    return SaveBlocks(handover.pages.job, start, stop, lengths, frozen(tables), wanted, is_drafted=is_drafted)


def is_last(handover: Handover) -> bool:
    """Whether everything that its pages wait for has been computed, or is by the end of this step."""
    return handover.pages is not None and handover.saved_tokens == handover.pages.num_tokens


def frozen(tables: Sequence[Table]) -> tuple[tuple[int, ...], ...]:
    """Block ids as they are now."""
    return tuple(tuple(table) for table in tables)


def _states_at(
    layout: VllmLayout,
    before: int,
    after: int,
    handover: Handover,
    tables: Sequence[Table],
    offers: Sequence[StateOffer],
    *,
    is_drafted: bool,
) -> tuple[int, ...]:
    """At which lengths this step has states to save: at its ends, and where it leaves some behind on its way.

    The state at its beginning is still there only if the step puts the later one into another block.
    """
    saved = set()
    offered = {(offer.table, offer.length) for offer in offers}
    for length in sorted({before, after, *(offer.length for offer in offers)}):
        missing = {
            place.group
            for place in layout.places
            if place.layer.kind is LayerKind.STATE
            and (place.layer.table, length) not in offered
            and not (_has_state(place, length, before, after, tables) and (length == before or not is_drafted))
        }
        wanted = {key for key in handover.unsaved_states if key[1] == length and key[0] not in missing}
        handover.unsaved_states -= wanted
        saved |= {length for _ in wanted}
    return tuple(sorted(saved))


def _before_drafts(
    layout: VllmLayout, before: int, after: int, drafted: int, tables: Sequence[Table]
) -> list[StateOffer]:
    """Where a step with drafts has its states. Each of its tokens has a block, from the one on that its last token belongs to.
    The first of them has the state after the first token, which alone is no draft.

    A prompt's first tokens have none: vLLM computes them as one piece, drafts among them.
    """
    if after != before + 1 or not before:
        return []
    sizes = {
        place.layer.table: place.layer.block_tokens for place in layout.places if place.layer.kind is LayerKind.STATE
    }
    found = {table: state_block(tables[table], after + drafted, size) for table, size in sizes.items()}
    return [StateOffer(table, block, after) for table, block in found.items() if block != NULL_BLOCK]


def _has_state(place: LayerPlace, length: int, before: int, after: int, tables: Sequence[Table]) -> bool:
    """Whether the table says which block has the state."""
    if length not in (before, after) or (length == before and before % place.layer.block_tokens):
        return False
    return state_block(tables[place.layer.table], length, place.layer.block_tokens) != NULL_BLOCK

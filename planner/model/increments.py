"""Prompts that decode nodes compute themselves, as they hold what is before them: what these take, and how many there are."""

from planner.model.profile import DecodeProfile, PrefillCurve
from planner.model.queueing import erlang_b
from planner.model.traffic import Lengths


def held_seconds(lengths: Lengths, local: PrefillCurve) -> float:
    """What an average request takes of a decode node's GPUs as a prompt: of its time, the server's part needs none."""
    if lengths.held is None:
        return 0.0
    return float((lengths.weights * lengths.held) @ (local.after(lengths.uncached, lengths.cached) - local(0)))


def full_chance(decode: DecodeProfile, busy: float) -> float:
    """How often a decode node has no place, where its places are used for that share of the time. Then another one is chosen,
    whatever the first holds.
    """
    return erlang_b(decode.max_running, busy * decode.max_running)

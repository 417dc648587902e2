"""A simulated decider's estimates: what a gateway would have learned, or the truth.

Profiles make the truth. The estimators are those of gateways, fed by what ends in virtual time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from planner.decisions.estimates.accuracy import Accuracy, Error
from planner.decisions.estimates.decoding import LearnedSteps
from planner.decisions.estimates.durations import AnswerEstimate, LearnedCost, MoveEstimate
from planner.decisions.routing.policy import PlacementPolicy
from planner.decisions.views import NodeView, PrefillCost, Role
from planner.model.profile import PrefillCurve
from planner.simulator.loop import Loop
from planner.simulator.nodes.node import DecodeNode, PrefillNode, SimulatedRequest

Nodes = Mapping[str, PrefillNode]
Decodes = Mapping[str, DecodeNode]


class LearnedTimes(LearnedCost):
    """Times of prefill and of decode steps as learned; queues by the tokens that are on the nodes now, so a view does not age."""

    def __init__(self, nodes: Nodes, decodes: Decodes) -> None:
        self._learned_steps = LearnedSteps()
        super().__init__(steps=self._learned_steps)
        self._prefills = nodes
        self._decodes = decodes

    def learn_steps(self, now: float, job: SimulatedRequest) -> None:
        """Its answer has ended, and its decode node does not count it any more."""
        beside = (job.beside + job.decode_node.running + 1) / 2
        self._learned_steps.observe(job.decode_node.node_id, beside, (now - job.decode_start) / max(1.0, job.output))

    def queue_s(self, node: NodeView) -> float:
        known: Nodes | Decodes = self._decodes if node.role is Role.DECODE else self._prefills
        if not (tokens := known[node.node_id].queued_tokens):
            return 0.0
        curve = self.curve(node)
        return tokens / self.tokens_per_s if curve is None else tokens * curve.seconds_per_token

    def queues_s(self, nodes: Sequence[NodeView]) -> list[float]:
        prefills, curves, found = self._prefills, self._curves, list[float]()
        for node in nodes:
            tokens = prefills[node.node_id].queued_tokens
            if not tokens:
                found.append(0.0)
                continue
            curve = curves.get(node.node_id)
            if curve is not None and curve.cluster == node.cluster:
                found.append(tokens * curve.seconds_per_token)
            elif (estimate := self.estimate(node)) is not None:  # its curve need not be solved for this
                found.append(tokens * estimate.seconds_per_token)
            else:
                found.append(tokens / self.tokens_per_s)
        return found


class TrueTimes(PrefillCost):
    """Prefill times from the clusters' own profiles, queues as they are now."""

    def __init__(self, curves: Mapping[str, PrefillCurve], nodes: Nodes, decodes: Decodes, loop: Loop) -> None:
        super().__init__()
        self._curves = curves
        self._nodes = nodes
        self._decodes = decodes
        self._loop = loop
        self._num_tokens = -1
        self._known: dict[tuple[str, int], float] = {}

    def prefill_s(self, node: NodeView, num_tokens: int, cached_tokens: int) -> float:
        # All nodes are asked about one request after the other, and many have the same answer.
        if num_tokens != self._num_tokens:
            self._num_tokens = num_tokens
            self._known.clear()
        key = (node.cluster, cached_tokens)
        answer = self._known.get(key)
        if answer is None:
            answer = self._known[key] = self._curves[node.cluster].with_prefix(num_tokens, cached_tokens)
        return answer

    def queue_s(self, node: NodeView) -> float:
        known: Nodes | Decodes = self._decodes if node.role is Role.DECODE else self._nodes
        return known[node.node_id].queue_s(self._loop.now)

    def step_s(self, node: NodeView, running: int) -> float:
        return self._decodes[node.node_id].profile.at(running)

    def queues_s(self, nodes: Sequence[NodeView]) -> list[float]:
        known, now = self._nodes, self._loop.now
        return [known[node.node_id].queue_s(now) for node in nodes]


class Experience:
    """What a decider has learned, beside prefill times, and how right it was; of prefill times, what a gateway would say."""

    def __init__(self, placement: PlacementPolicy, times: LearnedTimes) -> None:
        self.placement = placement  # with what moves are taken to need
        self._times = times
        rate = placement.fetch_bytes_per_s
        self._moves = MoveEstimate(rate) if rate else None
        self._answers = AnswerEstimate()
        self._arrivals: dict[tuple[str, str], Accuracy] = {}  # by (source, destination)

    def on_moved(self, now: float, move: tuple[float, float]) -> None:
        """A prefix has moved inside a cluster: bytes, seconds."""
        moves = self._moves
        assert moves is not None
        moves.observe(*move)
        self.placement = replace(
            self.placement,
            fetch_bytes_per_s=moves.bytes_per_s,
            fetch_calls_s=moves.calls_s,
            fetch_lateness=moves.lateness,
        )

    def on_arrived(self, ends: tuple[str, str], predicted_s: float, seconds: float) -> None:
        """What was routed over a link is there, `seconds` after the decision."""
        self._arrivals.setdefault(ends, Accuracy()).note(predicted_s, seconds)

    def on_answered(self, tokens: float) -> None:
        self._answers.observe(tokens)

    def answer_tokens(self) -> float:
        """Predicted length of an answer."""
        return self._answers.tokens()

    def errors(self) -> dict[tuple[str, str], Error]:
        """By what was predicted, and of what."""
        found = {("prefill", cluster): error for cluster, error in self._times.errors().items()}
        found |= {("transfer", f"{ends[0]} to {ends[1]}"): each.error for ends, each in self._arrivals.items()}
        if self._moves is not None:
            found["transfer", "moves"] = self._moves.error
        found["output", "answers"] = self._answers.error
        return {key: error for key, error in found.items() if error.samples}

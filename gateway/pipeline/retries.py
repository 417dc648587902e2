"""What follows from a leg that failed: the planner's rule, within this gateway's budget, and what node and counts hear."""

from collections.abc import Callable

from gateway.cluster.registry import Clusters
from gateway.request.request import Request
from gateway.telemetry.recorder import RequestRecorder
from planner.decisions.failures.retries import FailedStage, FailureKind, RetryBudget, RetryRule


class Retries:
    """Of all requests of a process."""

    def __init__(
        self,
        clusters: Clusters,
        accounts: RequestRecorder,
        clock: Callable[[], float],
        *,
        max_tries: int,
        max_takeovers: int,
        share: float,
        least: float,
    ) -> None:
        """A request is tried on `max_tries` nodes, a stream taken over so often; `share` and `least` are `RetryBudget`'s."""
        self._clusters = clusters
        self._accounts = accounts
        self._clock = clock
        self._budget = RetryBudget(share, least)
        self.max_tries = max_tries
        self._max_takeovers = max_takeovers

    def begins(self, request: Request) -> None:
        """A request that may be tried again, if need be."""
        self._budget.request(self._clock(), request.prompt.num_tokens)

    def are_takeovers_spent(self, request: Request) -> bool:
        """Whether as many engines have gone on with its answer as may."""
        return request.progress.takeovers >= self._max_takeovers

    def rule_after(
        self, request: Request, stage: FailedStage, node_id: str, failure: FailureKind, tries: int
    ) -> RetryRule:
        """What is to be done, now that `node_id` has failed, as the last of so many tries."""
        if stage is FailedStage.STREAM and self.are_takeovers_spent(request):
            tries = self.max_tries
        rule = self._budget.rule_after(
            self._clock(),
            stage,
            failure,
            tries=tries,
            max_tries=self.max_tries,
            deaths=len(request.progress.deaths),
            tokens=request.prompt.num_tokens,
        )
        if rule.is_over_budget:
            self._accounts.not_tried_again(request, stage)
        if rule.suspect:
            self._clusters.suspect(node_id)
        return rule

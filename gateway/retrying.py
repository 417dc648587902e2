"""What follows from a leg that failed: the planner's rule, within this gateway's budget, and what node and counts hear."""

from collections.abc import Callable, Mapping

from gateway.accounts import Accounts
from gateway.clusters import Clusters
from gateway.request import Request
from planner.decisions.retries import Failure, RetryBudget, Rule, Stage, tries_of


class Retries:
    """Of all requests of a process."""

    def __init__(
        self,
        clusters: Clusters,
        accounts: Accounts,
        clock: Callable[[], float],
        *,
        max_tries: int,
        share: float,
        least: float,
    ) -> None:
        """A request is tried on `max_tries` nodes; `share` and `least` are `RetryBudget`'s."""
        self._clusters = clusters
        self._accounts = accounts
        self._clock = clock
        self._budget = RetryBudget(share, least)
        self.max_tries = max_tries

    def begins(self) -> None:
        """A request that may be tried again, if need be."""
        self._budget.request(self._clock())

    def rule_after(self, request: Request, stage: Stage, node_id: str, failed: Mapping[str, Failure]) -> Rule:
        """What is to be done, now that `node_id` has failed, too; `failed` are the nodes that have by now, and how."""
        rule = self._budget.rule_after(
            self._clock(),
            stage,
            failed[node_id],
            tries=tries_of(failed.values()),
            max_tries=self.max_tries,
            deaths=len(request.deaths),
        )
        if rule.is_over_budget:
            self._accounts.not_tried_again(request, stage)
        if rule.suspect:
            self._clusters.suspect(node_id)
        return rule

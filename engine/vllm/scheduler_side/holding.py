"""vLLM's asynchronous scheduler, with one word more: a request that is held stays so.

With the second model runner AsyncScheduler says after each step when its requests decode next, which overwrites what the
connector said while the step was put together. Here the connector has the last word.
"""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from engine.vllm.connector import PrfaasConnector


class HoldingScheduler(AsyncScheduler):  # type: ignore[misc]
    """AsyncScheduler that asks the connector again once a step is on its way."""

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        super()._update_after_schedule(scheduler_output)
        if isinstance(self.connector, PrfaasConnector):
            self.connector.after_schedule(scheduler_output.num_scheduled_tokens)


def holding_scheduler(*, vllm_config: Any, **others: Any) -> Scheduler:
    """What `--scheduler-cls` names: vLLM decides whether it schedules asynchronously after it has read that flag."""
    kind = HoldingScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    return kind(vllm_config=vllm_config, **others)

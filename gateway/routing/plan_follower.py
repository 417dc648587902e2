"""Follows a plan service: asks for the next plan, holds the question open, and does as the answer says.

    GET URL/plan?term=T&after=V&leader=L&wait_s=S ──► 200 a plan that is in force, another one than T, V of leader L
                                                      204 still that one, or none yet

The last plan stays whatever becomes of the service. It is written down before it is followed, so a gateway that starts again
begins with it. A plan of an earlier term or version is refused: a leader that has been replaced may not know it yet. Of two
leaders of a term one goes before the other, so that two services with a memory each do not take turns.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Protocol

import aiohttp
import msgspec

from gateway.api.openai import NOT_JSON
from gateway.config.plan import PlanConfig
from gateway.tasks import BACKOFF_S
from planner.decisions.plans.live_plan import LivePlan, refusal_of
from transport.control.bounded import BodyTooLong, read_bounded
from transport.control.durable import write_durably
from transport.wire.asked_servers import AskedServers, trust_of

log = logging.getLogger("prfaas.gateway.plan")

MAX_PLAN_BYTES: Final = 1 << 20
GRACE_S: Final = 10.0  # of an answer, beyond the time that the question is held open
_DECODER: Final = msgspec.json.Decoder(LivePlan)


class Counted(Protocol):
    """Where it is told."""

    def plan_polled(self, outcome: str) -> None: ...
    def plan_offered(self, outcome: str) -> None: ...


class PollFailed(Exception):
    """The service did not answer as it should; `reason` is a label."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Follower:
    """Keeps to the newest plan; `follow` is told of each. Raises GatewayConfigError for a secret that cannot be read.

    `asked` knows which certificate a service may have that speaks HTTPS; None: one that this host trusts.
    """

    def __init__(
        self,
        config: PlanConfig,
        follow: Callable[[LivePlan], None],
        counted: Counted,
        asked: AskedServers | None = None,
        model: str = "",
    ) -> None:
        """`model` is the name of the model that follows; "": it is called by what its nodes say."""
        self.plan: LivePlan | None = None
        self._model = model
        self._config = config
        self._follow = follow
        self._counted = counted
        self._asked = asked
        self._headers = config.headers()
        self._url = f"{config.url.rstrip('/')}/plan"

    def begin(self) -> None:
        """Does as the plan of the life before says; to be called before anything is routed."""
        path = self._config.plan_file
        if path is None or not path.exists():
            return
        try:
            plan = _DECODER.decode(path.read_bytes())
        except (OSError, *NOT_JSON) as error:
            self._counted.plan_offered("unreadable_file")
            log.warning("%s holds no plan: %s", path, error)
            return
        self._take(plan)

    async def run(self) -> None:
        """Asks on and on."""
        failures = 0
        async with aiohttp.ClientSession(headers=self._headers) as http:
            while True:
                try:
                    plan = await self._next(http)
                    failures = 0
                except PollFailed as error:
                    if not failures:
                        log.warning("the plan service at %s: %s; the last plan stays in force", self._config.url, error)
                    self._counted.plan_polled(error.reason)
                    await asyncio.sleep(BACKOFF_S[min(failures, len(BACKOFF_S) - 1)])
                    failures += 1
                    continue
                self._counted.plan_polled("unchanged" if plan is None else "ok")
                if plan is not None and not await self.offered(plan):
                    await asyncio.sleep(BACKOFF_S[-1])  # it would say the same again at once

    async def offered(self, plan: LivePlan) -> bool:
        """Follows `plan`, unless it is stale or another model's; returns whether it does."""
        if plan == self.plan:
            return True
        is_other = bool(plan.model and self._model) and plan.model != self._model
        refusal = "other_model" if is_other else refusal_of(plan, self.plan)
        if refusal is not None:
            self._counted.plan_offered(refusal)
            log.warning("plan %d of term %d is refused: %s", plan.version, plan.term, refusal)
            return False
        if self._config.plan_file is not None:
            try:
                await asyncio.to_thread(write_durably, self._config.plan_file, msgspec.json.encode(plan))
            except OSError as error:
                self._counted.plan_offered("unwritten_file")
                log.warning("plan %d will be forgotten at the next start: %s", plan.version, error)
        self._take(plan)
        return True

    def _take(self, plan: LivePlan) -> None:
        self.plan = plan
        self._follow(plan)
        self._counted.plan_offered("applied")
        setting = plan.setting
        log.info(
            "plan %d of term %d is followed: t = %g, tie share %g (%s)",
            plan.version, plan.term, setting.threshold_tokens, setting.tie_share, plan.reason,
        )  # fmt: skip

    async def _next(self, http: aiohttp.ClientSession) -> LivePlan | None:
        """The plan after the one that is followed; None while that one stands. Raises PollFailed."""
        term, version = self.plan.place if self.plan is not None else (0, 0)
        leader = self.plan.leader if self.plan is not None else ""
        asked = {"term": str(term), "after": str(version), "leader": leader, "wait_s": f"{self._config.wait_s:g}"}
        try:
            async with (
                asyncio.timeout(self._config.wait_s + GRACE_S),
                http.get(
                    self._url, params=asked, allow_redirects=False, ssl=trust_of(self._asked, self._url)
                ) as answer,
            ):
                if answer.status == 204:
                    return None
                if answer.status != 200:
                    raise PollFailed(f"status_{answer.status}", f"status {answer.status}")
                return _DECODER.decode(await read_bounded(answer.content.iter_any(), MAX_PLAN_BYTES))
        except TimeoutError:
            raise PollFailed("timeout", "no answer in time") from None
        except (aiohttp.ClientError, OSError) as error:  # OSError: files of our own
            raise PollFailed("unreachable", str(error) or type(error).__name__) from error
        except (BodyTooLong, *NOT_JSON) as error:
            raise PollFailed("bad_answer", f"no plan: {error}") from error

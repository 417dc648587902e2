"""`prfaas flows`: what goes from cluster to cluster and why, a line for each request, move, copy and probe."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from prfaas.commands.asking import GatewayClient
from prfaas.commands.top import rate, scaled, seconds
from prfaas.errors import AskError

EVERY_S: Final = 1.0
HEADER: Final = (
    f"{'ended':<8} {'from':>16} → {'to':<16} {'nodes':<24} {'kind':<8} {'bytes':>9} {'took':>9} {'rate':>11}  "
    f"{'outcome':<12} why · who"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowFilter:
    """Which: also within a cluster, if `all_of_them`; of one `link`, from and to a cluster, alone; of these `kinds` alone."""

    all_of_them: bool = False
    link: tuple[str, str] | None = None
    kinds: frozenset[str] = frozenset()

    def has(self, flow: Mapping[str, Any]) -> bool:
        """Whether it is one of them."""
        source, destination = flow["source_cluster"], flow["destination_cluster"]
        if self.link is not None and (source, destination) != self.link:
            return False
        if self.kinds and flow["kind"] not in self.kinds:
            return False
        return self.all_of_them or self.link is not None or source != destination


def follow(
    gateway: GatewayClient,
    wanted: FlowFilter,
    *,
    once: bool,
    sleep: Callable[[float], None] = time.sleep,
    tell: Callable[[str], None] = lambda line: None,
) -> Iterator[dict[str, Any]]:
    """Flows that have ended, oldest first, then those that end from now on.

    Raises AskError if no gateway answers at first; one that goes away is asked again, and `tell` is told. A gateway that has
    started again counts from 1, and answers a number of before with all that it keeps.
    """
    since = 0
    flows = gateway.lines("/prfaas/flows", since=since)
    while True:
        for flow in flows:
            since = flow["seq"]
            if wanted.has(flow):
                yield flow
        if once:
            return
        sleep(EVERY_S)
        flows = _asked_until_answered(gateway, since, sleep, tell)


def _asked_until_answered(
    gateway: GatewayClient, since: int, sleep: Callable[[float], None], tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    told = ""
    while True:
        try:
            flows = gateway.lines("/prfaas/flows", since=since)
        except AskError as error:
            if str(error) != told:
                told = str(error)
                tell(f"{told}; it is asked again every {EVERY_S:.0f} s")
            sleep(EVERY_S)
        else:
            if told:
                tell(f"{gateway.url} answers again")
            return flows


def line(flow: Mapping[str, Any]) -> str:
    """A flow as text, below HEADER."""
    took = flow["seconds"]
    speed = rate(flow["bytes"] / took) if took and flow["bytes"] else "–"
    who = f"{flow['who']}, class {flow['service_class']}" if flow["service_class"] else flow["who"]
    nodes = f"{flow['source']} → {flow['destination']}"
    ended = time.strftime("%H:%M:%S", time.localtime(flow["at"]))
    return (
        f"{ended} {flow['source_cluster']:>16} → {flow['destination_cluster']:<16} {nodes:<24} {flow['kind']:<8}"
        f" {scaled(flow['bytes']) + 'B':>9} {seconds(took):>9} {speed:>11}  {flow['outcome']:<12} {flow['why']} · {who}"
    )

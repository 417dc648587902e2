"""`prfaas top`: the console in a terminal: links, clusters, nodes, tenants and the latest requests, a screenful a second."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from prfaas.commands.asking import GatewayClient
from prfaas.errors import AskError

BUSY: Final = 0.65
FULL: Final = 0.8
KEPT_REQUESTS: Final = 500
LAST_S: Final = 60.0
MOST_TENANTS: Final = 20
USAGE_EVERY_S: Final = 10.0  # it may be long to add up
PREFIXES: Final = ("", "k", "M", "G", "T")
WORST_FIRST: Final = ("down", "engine_down", "engine_silent", "starting", "converting", "draining", "unknown", "ready")

Snapshot = Mapping[str, Any]


class Screen:
    """What is shown: the latest snapshot, and of those before what a rate needs."""

    def __init__(self) -> None:
        self._latest: Snapshot | None = None
        self._before: Snapshot | None = None
        self._requests: deque[Mapping[str, Any]] = deque(maxlen=KEPT_REQUESTS)
        self._usage: Snapshot = {"data": []}
        self.seq = 0

    def take_usage(self, usage: Snapshot | None) -> None:
        """The next sums of tenants; without one the former ones stay."""
        self._usage = usage if usage is not None else self._usage

    def take(self, snapshot: Snapshot) -> None:
        """The next one, asked for with `since=seq`."""
        if self._latest is not None and self._latest["boot"] != snapshot["boot"]:
            self._requests.clear()
            self._latest = None
        self._before, self._latest = self._latest, snapshot
        self.seq = snapshot["last_seq"]
        self._requests.extend(snapshot["requests"])

    def page(self, max_nodes: int) -> RenderableType:
        """All of it, with the `max_nodes` nodes that need looking at most."""
        assert self._latest is not None
        now = self._latest
        parts: list[RenderableType] = [self._head(now), _links(now["links"])]
        if lines := [line for link in now["links"] for line in link["status"].get("lines", ())]:
            parts.append(_lines(lines))
        parts.append(self._clusters(now))
        tenants = self._usage["data"][: min(MOST_TENANTS + 1, max(3, max_nodes // 4))]
        parts.append(_nodes(now["nodes"], max(3, max_nodes - len(tenants) - 3) if tenants else max_nodes))
        if tenants:
            parts.append(_tenants(tenants, self._usage))
        if lost := _lost(now.get("registries", ())):
            parts.append(lost)
        if models := _models(now.get("models", ())):
            parts.append(models)
        if revisions := _revisions(now["nodes"]):
            parts.append(revisions)
        if plain := _plain(now["nodes"]):
            parts.append(plain)
        if names := _names(now.get("names", {})):
            parts.append(names)
        return Group(*parts)

    def _head(self, now: Snapshot) -> Text:
        last = [each for each in self._requests if each["arrived_s"] + (each["e2e_s"] or 0.0) > now["clock_s"] - LAST_S]
        done = [each for each in last if each["status"] == 200]
        ttfts = sorted(each["ttft_s"] for each in done if each["ttft_s"] is not None)
        remote = sum(each["route"] == "remote" for each in done)
        plan = f"plan {now['plan']['version']}" if now["plan"] else "no plan"
        workers = f", {sum(now['workers'].values())} workers" if now["workers"] else ""
        head = Text(f"{now['model'] or 'no model'}{workers}  ", style="bold")
        head.append(
            f"in flight {now['in_flight']} of {now['max_in_flight']}, in line {now['waiting']}  "
            f"t = {now['threshold_tokens']:.0f}, {plan}\n",
            style="not bold",
        )
        head.append(
            f"last minute: {len(last)} requests, {_share(remote, len(done))} remote, "
            f"{len(last) - len(done)} refused or failed, TTFT p50 {_at(ttfts, 0.5)} p90 {_at(ttfts, 0.9)}",
            style="not bold",
        )
        return head

    def _clusters(self, now: Snapshot) -> Table:
        table = _table("cluster", "nodes", "ready", "running", "waiting", "tokens queued", "egress")
        for cluster in dict.fromkeys(node["cluster"] for node in now["nodes"]):
            nodes = [node for node in now["nodes"] if node["cluster"] == cluster]
            table.add_row(
                f"{cluster} ({nodes[0]['kind']})",
                str(len(nodes)),
                str(sum(node["state"] == "ready" for node in nodes)),
                *(str(sum(node[key] for node in nodes)) for key in ("running", "waiting", "queued_tokens")),
                self._egress(nodes),
            )
        return table

    def _egress(self, nodes: Sequence[Mapping[str, Any]]) -> str:
        if self._latest is None or self._before is None:
            return "–"
        before = {node["node"]: node["egress_bytes"] for node in self._before["nodes"]}
        passed = self._latest["at"] - self._before["at"]
        sent = sum(max(0, node["egress_bytes"] - before.get(node["node"], node["egress_bytes"])) for node in nodes)
        return rate(sent / passed) if passed > 0 else "–"


def _links(links: Iterable[Mapping[str, Any]]) -> Table:
    table = _table("link", "breaker", "used", "carries", "can carry", "budget", "queue", "RTT", "resent", "pressure")
    for link in links:
        status = link["status"]
        word, style = _level(status)
        carried = sum(
            (each["available_bytes_per_s"] or each["budget_bytes_per_s"] or 0) * each["utilisation"]
            for each in link["senders"]
        )
        table.add_row(
            f"{status['source']} → {status['destination']}",
            _breaker(link["senders"]),
            Text(f"{status['utilisation']:.0%}{word}", style=style),
            rate(carried),
            rate(status["available_bytes_per_s"]),
            rate(status["budget_bytes_per_s"]),
            f"{scaled(status['queued_bytes'])}B, {seconds(link['drain_s'])}",
            seconds(status["rtt_s"]),
            f"{link['retransmit_ratio']:.2%}",
            f"{link['pressure']:.2f}",
        )
    return table


def _lines(lines: Iterable[Mapping[str, Any]]) -> Table:
    """Lines that are described: what they carry, and what a month at this rate costs."""
    table = _table("line", "ends", "used", "carries", "ours", "a month", "budget", "shared with")
    for line in lines:
        style = {"critical": "bold magenta", "warn": "yellow"}.get(line["level"], "")
        word = f" {line['level'].upper()}" if style else ""
        table.add_row(
            line["name"],
            f"{line['source']} → {line['destination']}",
            Text(f"{line['used_ratio']:.0%}{word}", style=style),
            rate(line["carried_bytes_per_s"]),
            rate(line["rate_bytes_per_s"]),
            f"{line['spend_per_month']:,.0f}",
            f"{line['budget_per_month']:,.0f}" if line["budget_per_month"] else "–",
            ", ".join(line["shared_by"]) or "–",
        )
    return table


def _level(status: Mapping[str, Any]) -> tuple[str, str]:
    """How full a link is, as a word and as a style."""
    if status["drained"]:
        return " drained", "reverse"
    if not status["up"]:
        return " DOWN", "reverse"
    if status["utilisation"] >= FULL:
        return " FULL", "bold magenta"
    return (" busy", "yellow") if status["utilisation"] >= BUSY else ("", "")


def _breaker(senders: Sequence[Mapping[str, Any]]) -> str:
    for state in ("open", "half_open", "unheard"):
        if number := sum(each["breaker"] == state for each in senders):
            return f"{state} ({number} of {len(senders)})"
    return "closed" if senders else "no sender"


def _tenants(accounts: Iterable[Mapping[str, Any]], usage: Snapshot) -> RenderableType:
    """Those with the most tokens, and the rest as one."""
    table = _table("tenant", "requests", "prompt tokens", "cached", "answer tokens")
    for each in accounts:
        table.add_row(
            _name(each["tenant"]),
            f"{sum(each['requests'].values())}",
            scaled(each["prompt_tokens"]),
            _share(each["cached_tokens"], each["prompt_tokens"]),
            scaled(each["completion_tokens"]),
        )
    if "gateways" not in usage:
        return table
    told = f"of {usage['gateways']} gateways" if usage["complete"] else "sums of gateways are not complete"
    return Group(table, Text(told, style="dim" if usage["complete"] else "bold yellow"))


def _name(text: str) -> Text:
    """What a registry says is called so: no markup, and nothing that moves a terminal's cursor."""
    return Text("".join(each if each.isprintable() else "?" for each in text))


def _lost(registries: Sequence[Mapping[str, Any]]) -> Text | None:
    """Registries of nodes that are lost, and what others list in vain."""
    lines = []
    for each in registries:
        if each["state"] != "fresh":
            lines.append(f"members: {each['source']} is {each['state']} for {each['frozen_s']:.0f} s: {each['reason']}")
        lines += [f"members: {each['source']}: {problem}" for problem in each["problems"]]
        if each["refused"]:
            lines.append(f"members: {each['source']}: {each['refused']} are left out, as traffic would be in clear")
    return Text("\n".join(lines), style="bold yellow") if lines else None


def _models(models: Sequence[Mapping[str, Any]]) -> Text | None:
    """How each model is served; None: there is one only."""
    if len(models) < 2:
        return None
    lines = []
    for each in models:
        state = f"{each['nodes']} nodes" if each["is_ready"] else "no decode node ready"
        plan = f", plan {each['plan']}" if each["plan"] else ""
        waiting = f", {each['waiting']} wait" if each["waiting"] else ""
        name = each["model"] or "(not known yet)"
        lines.append(f"model {name}: {state}, t = {each['threshold_tokens']:g}{plan}{waiting}")
    return Text("\n".join(lines), style="" if all(each["is_ready"] for each in models) else "bold yellow")


def _revisions(nodes: Sequence[Mapping[str, Any]]) -> Text | None:
    """How many ready nodes of each role each revision of a model has; None: each has one only."""
    ready = [each for each in nodes if each.get("revision") and each["state"] == "ready"]
    counts = Counter((str(each.get("model", "")), each["revision"], each["role"]) for each in ready)
    names = sorted({(model, revision) for model, revision, _ in counts})
    several = [model for model, number in Counter(model for model, _ in names).items() if number > 1]
    lines = []
    for model, name in names:
        if model in several:
            roles = [f"{number} {role}" for (*of, role), number in sorted(counts.items()) if of == [model, name]]
            lines.append(f"revision {name}: {', '.join(roles)}")
    return Text("\n".join(lines)) if lines else None


def _plain(nodes: Sequence[Mapping[str, Any]]) -> Text | None:
    """What speaks in clear to other machines; None: nothing does, or the gateway is of a version that does not say."""
    hops = Counter(listener for node in nodes for listener in node.get("plain", ()))
    if not hops:
        return None
    return Text(
        f"in clear: {', '.join(f'{listener} of {count}' for listener, count in hops.items())} nodes", style="yellow"
    )


def _names(rotation: Mapping[str, Any]) -> Text | None:
    """How far names of blocks have moved to a new secret; None: there is one secret, or the gateway does not say."""
    if not rotation.get("earlier"):
        return None
    if rotation["waits_for"]:
        told = f"wait until {', '.join(rotation['waits_for'])} have the newest secret"
    elif rotation["left_s"]:
        told = f"{rotation['moved']:.0%} moved to the newest secret, all in {rotation['left_s'] / 3600:.1f} h"
    else:
        told = "the earlier secret is of no use any more: remove its line"
    return Text(f"names of blocks: {told}", style="yellow")


def _nodes(nodes: Sequence[Mapping[str, Any]], limit: int) -> RenderableType:
    table = _table("node", "cluster", "role", "state", "running", "waiting", "tokens queued", "step", "arena in use")

    def need(node: Mapping[str, Any]) -> tuple[int, int, int]:
        state = node["state"] if node["state"] in WORST_FIRST else "unknown"  # a newer gateway may know more of them
        return WORST_FIRST.index(state), -node["queued_tokens"], -node["running"]

    for node in sorted(nodes, key=need)[:limit]:
        total, unused = node["pages_total"], node["pages_free"] + node["pages_evictable"]
        table.add_row(
            node["node"],
            node["cluster"],
            node["role"],
            Text(node["state"], style="" if node["state"] == "ready" else "bold reverse"),
            f"{node['running']} of {node['slots']}",
            str(node["waiting"]),
            str(max(node["queued_tokens"], node["pending_tokens"])),
            seconds(node["step_s"]) if node["step_s"] else "–",
            f"{1 - unused / total:.0%}" if total else "–",
        )
    left = len(nodes) - limit
    return Group(table, Text(f"… and {left} more", style="dim")) if left > 0 else table


def watch(
    gateway: GatewayClient, console: Console, every_s: float, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Shows it until the user interrupts. Raises AskError if no gateway answers at first; one that goes away is asked again."""
    screen = Screen()
    screen.take(gateway.get("/prfaas/console", since=0))
    screen.take_usage(_usage(gateway))
    usage_s = 0.0
    with Live(screen.page(_room(console)), console=console, screen=True, auto_refresh=False) as live:
        while True:
            sleep(every_s)
            try:
                screen.take(gateway.get("/prfaas/console", since=screen.seq))
                usage_s += every_s
                if usage_s >= USAGE_EVERY_S:
                    usage_s = 0.0
                    screen.take_usage(_usage(gateway))
                page = screen.page(_room(console))
            except AskError as error:
                page = Group(Text(str(error), style="bold reverse"), screen.page(_room(console) - 2))
            live.update(page, refresh=True)


def once(gateway: GatewayClient) -> RenderableType:
    """One page, with every node."""
    screen = Screen()
    screen.take(gateway.get("/prfaas/console", since=0))
    screen.take_usage(_usage(gateway))
    return screen.page(max_nodes=1 << 30)


def _usage(gateway: GatewayClient) -> Snapshot | None:
    """Tenants' sums; None: the gateway does not tell them now."""
    try:
        usage: Snapshot = gateway.get("/prfaas/usage", top=MOST_TENANTS)
    except AskError:
        return None
    return usage


def _room(console: Console) -> int:
    """Lines for nodes: what the rest leaves of the screen, roughly."""
    return max(3, console.height - 18)


def _table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for i, head in enumerate(heads):
        is_word = i == 0 or head in ("cluster", "role", "state", "breaker")
        table.add_column(head, justify="left" if is_word else "right", no_wrap=True)
    table.title = Text("")
    return table


def scaled(value: float) -> str:
    """With a prefix of a thousand each."""
    size, step = float(value), 0
    while abs(size) >= 999.5 and step < len(PREFIXES) - 1:
        size, step = size / 1000, step + 1
    return f"{size:.0f} {PREFIXES[step]}" if step == 0 or abs(size) >= 100 else f"{size:.1f} {PREFIXES[step]}"


def rate(bytes_per_s: float | None) -> str:
    """Bytes per second; a dash where it is unknown."""
    return "–" if bytes_per_s is None else f"{scaled(bytes_per_s)}B/s"


def seconds(value: float | None) -> str:
    """A time, short."""
    if value is None:
        return "–"
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.1f} ms"


def _at(values: Sequence[float], share: float) -> str:
    return seconds(values[min(len(values) - 1, int(share * len(values)))]) if values else "–"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "–"

"""`prfaas explain`: where a request would go now, and why, as a gateway says it; nothing is sent to any node."""

import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from prfaas.commands.asking import GatewayClient
from prfaas.errors import AskError

TOKEN_IDS: Final = 256  # every vocabulary has as many
MB: Final = 1e6
REVISION_CHARS: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainWish:
    """What is asked. A body in `file` ("-": standard input), a `prompt`, or so many `tokens` that are cached nowhere."""

    file: str | None = None
    prompt: str | None = None
    tokens: int | None = None
    model: str | None = None
    endpoint: str | None = None
    tenant: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


def ask(gateway: GatewayClient, wish: ExplainWish) -> dict[str, Any]:
    """The gateway's explanation. Raises AskError."""
    found: dict[str, Any] = gateway.post(
        "/prfaas/explain", _body(gateway, wish), wish.headers, endpoint=wish.endpoint, tenant=wish.tenant
    )
    return found


def _body(gateway: GatewayClient, wish: ExplainWish) -> bytes:
    if wish.prompt is None and wish.tokens is None:
        return _read(wish.file or "-")
    prompt: str | list[int] = wish.prompt or ""
    if wish.tokens is not None:
        prompt = random.choices(range(TOKEN_IDS), k=wish.tokens)
    return json.dumps({"model": wish.model or _served(gateway), "prompt": prompt}).encode()


def _read(file: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as exc:
        raise AskError(f"{file}: {exc.strerror}") from exc


def _served(gateway: GatewayClient) -> str:
    # Operators' keys open operators' pages alone, which may have a port of their own.
    model = gateway.get("/prfaas/console")["model"]
    if not model:
        raise AskError("the gateway serves no model yet; --model names one")
    return str(model)


def show(found: Mapping[str, Any], console: Console) -> None:
    """The explanation as text."""
    console.print(
        f"{found['num_tokens']} tokens to {found['endpoint']}, class {found['service_class']}, plan {found['plan'] or 'none'}",
        highlight=False,
    )
    _show_revisions(found, console)
    verdict, decision = found["verdict"], found["decision"]
    if decision is not None:
        _show_decision(decision, console)
    if not verdict["accepted"]:
        retry = f", to come again after {verdict['retry_after_s']:.1f} s" if verdict["retry_after_s"] else ""
        console.print(
            f"refused with {verdict['status']} {verdict['code']}{retry}: {verdict['message']}", style="bold red"
        )
    elif verdict["line_s"]:
        console.print(f"others wait before it: about {verdict['line_s']:.1f} s in line")
    for each in found["left_out"]:
        console.print(f"left out: {each['node']} of {each['cluster']} ({each['role']}): {each['why']}", style="yellow")


def _show_revisions(found: Mapping[str, Any], console: Console) -> None:
    """How its revision of the model is chosen, where there are several."""
    if not found.get("revisions"):
        return
    why = "it has more of the prompt, and is sooner" if found["is_held"] else "drawn by its share"
    console.print(
        f"revision {found['revision'][:REVISION_CHARS]}, by {' and '.join(found['roles'])}: {why}", highlight=False
    )
    rows = [
        [
            f"{'→' if each['is_chosen'] else ' '} {each['revision'][:REVISION_CHARS]}",
            f"{each['share']:.0%}",
            str(each["cached_tokens"]),
            _s(each["ttft_s"]) if each["share"] else "",
        ]
        for each in found["revisions"]
    ]
    console.print(_table("revision", ("share", "cached", "TTFT"), rows))


def _show_decision(decision: Mapping[str, Any], console: Console) -> None:
    route = decision["route"]
    where = route["prefill_node"] or f"{route['decode_node']} itself"
    console.print(
        f"prefill on {where}, decode on {route['decode_node']} ({route['reason']})", style="bold", highlight=False
    )
    console.print(decision["words"], highlight=False)
    tbt_s = decision["predicted_tbt_s"]
    console.print(
        f"first token in {_s(decision['predicted_ttft_s'])}, {_s(tbt_s) if tbt_s else 'no prediction'} per token after it,"
        f" {route['cached_tokens']} of its tokens cached, {route['coded_bytes'] / MB:.1f} MB over a link",
        highlight=False,
    )
    console.print(_table("prefill node", ("cluster", "cached", "queue", "compute", "price", "transfer", "TTFT", "why not"),
        [_prefill(each, decision["words"]) for each in decision["prefills"]]))  # fmt: skip
    console.print(_table("decode node", ("cluster", "running", "waiting", "places", "TBT", "holds", "room", "why not"),
        [_decode(each) for each in decision["decodes"]]))  # fmt: skip
    if decision["links"]:
        console.print(_table("link", ("up", "rate", "used", "backlog", "RTT", "resent", "pressure", "scarce"),
            [_link(each) for each in decision["links"]]))  # fmt: skip


def _table(first: str, others: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in (first, *others):
        table.add_column(name, justify="left" if name in (first, "cluster", "why not") else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _prefill(each: Mapping[str, Any], words: str) -> list[str]:
    name = f"{'→' if each['is_chosen'] else ' '} {each['node']}"
    if not each["is_reachable"]:
        return [name, each["cluster"], str(each["cached_tokens"]), *[""] * 5, each["why_not"]]
    cached = f"{each['cached_tokens']}{' from ' + each['fetch_from'] if each['fetch_from'] else ''}"
    seconds = [_s(each[key]) for key in ("queue_s", "compute_s", "price_s", "transfer_s")]
    return [
        name,
        each["cluster"],
        cached,
        *seconds,
        _s(max(each["ttft_s"], each["arrives_s"])),
        each["why_not"].replace(words, "see above"),
    ]


def _decode(each: Mapping[str, Any]) -> list[str]:
    return [
        f"{'→' if each['is_chosen'] else ' '} {each['node']}",
        each["cluster"],
        *(str(each[key]) for key in ("running", "waiting", "max_running")),
        _s(each["tbt_s"]) if each["tbt_s"] else "?",
        str(each["attention_tokens"]),
        "?" if each["room_tokens"] is None else str(each["room_tokens"]),
        each["why_not"],
    ]


def _link(each: Mapping[str, Any]) -> list[str]:
    rate = each["rate_bytes_per_s"]
    return [
        f"  {each['source']} → {each['destination']}",
        "yes" if each["up"] else "no",
        "?" if rate is None else f"{rate / MB:.1f} MB/s",
        f"{each['utilisation']:.0%}",
        _s(each["backlog_s"]),
        _s(each["rtt_s"]),
        f"{each['retransmit_ratio']:.2%}",
        f"{each['pressure']:.2f}",
        "yes" if each["is_scarce"] else "no",
    ]


def _s(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"

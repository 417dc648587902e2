"""What each tenant has been served since the gateway began: `GET /prfaas/usage`, as JSON, or with `?format=csv` as a table.

It is read off the counters that Prometheus is told, so that workers add up, and one that died is still counted.
"""

import csv
import io
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

COLUMNS: Final = ("tenant", "what", "source", "destination", "value")
TOKENS: Final = ("prompt", "cached", "completion")


class SentBytes(msgspec.Struct, frozen=True):
    """KVCache that went from cluster to cluster: for requests at once (`request`), or as a prefix that one asked for (`move`)."""

    source: str
    destination: str
    kind: str
    bytes: int


class TenantUsage(msgspec.Struct, kw_only=True):
    """Of one tenant. `requests` are by status; `cached_tokens` are part of `prompt_tokens`."""

    tenant: str
    requests: dict[str, int] = {}
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    kv_bytes: list[SentBytes] = []


def spent_by(
    requests: Iterable[tuple[Mapping[str, str], float]],
    tokens: Iterable[tuple[Mapping[str, str], float]],
    sent: Iterable[tuple[Mapping[str, str], float]],
) -> list[TenantUsage]:
    """By name, out of counters: labels and value of each series."""
    found: dict[str, TenantUsage] = {}

    def of(labels: Mapping[str, str]) -> TenantUsage:
        return found.setdefault(labels["tenant"], TenantUsage(tenant=labels["tenant"]))

    for labels, value in requests:
        of(labels).requests[labels["status"]] = int(value)
    for labels, value in tokens:
        if labels["kind"] in TOKENS:  # the one series beyond `process_metrics.MOST_SERIES` adds up all kinds
            setattr(of(labels), f"{labels['kind']}_tokens", int(value))
    for labels, value in sent:
        of(labels).kv_bytes.append(SentBytes(labels["source"], labels["destination"], labels["kind"], int(value)))
    return sorted(found.values(), key=lambda spent: spent.tenant)


def as_csv(tenants: Iterable[TenantUsage]) -> str:
    """The same, one number a line (RFC 4180)."""
    text = io.StringIO()
    lines = csv.writer(text)
    lines.writerow(COLUMNS)
    for each in tenants:
        lines.writerows((each.tenant, f"requests_{status}", "", "", count) for status, count in each.requests.items())
        lines.writerows((each.tenant, f"{kind}_tokens", "", "", getattr(each, f"{kind}_tokens")) for kind in TOKENS)
        lines.writerows(
            (each.tenant, f"kv_bytes_{sent.kind}", sent.source, sent.destination, sent.bytes) for sent in each.kv_bytes
        )
    return text.getvalue()

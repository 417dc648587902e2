"""What tenants have used, as counters that only grow: a number for each line of the table that `?format=csv` gives.

Counts of one run are joined: of two, the larger is the later. Counts of several runs are summed.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from gateway.telemetry.tenant_usage import TOKENS, SentBytes, TenantUsage

MOST: Final = 2**63 - 1
REQUESTS: Final = "requests_"
SENT: Final = "kv_bytes_"
OTHER: Final = "other"  # the tenant that stands for those beyond a bound, as in the metrics

Series = tuple[str, str, str, str]  # tenant, what, source, destination
Counts = Mapping[Series, int]


def counts_of(accounts: Iterable[TenantUsage]) -> dict[Series, int]:
    """The same as counters; what is 0 is left out."""
    counts: dict[Series, int] = {}
    for each in accounts:
        tenant = each.tenant
        for status, count in each.requests.items():
            counts[tenant, f"{REQUESTS}{status}", "", ""] = count
        for kind in TOKENS:
            counts[tenant, f"{kind}_tokens", "", ""] = getattr(each, f"{kind}_tokens")
        for sent in each.kv_bytes:
            counts[tenant, f"{SENT}{sent.kind}", sent.source, sent.destination] = sent.bytes
    return {series: count for series, count in counts.items() if count}


def accounts_of(counts: Counts) -> list[TenantUsage]:
    """The same as accounts, by name."""
    found: dict[str, TenantUsage] = {}
    for (tenant, what, source, destination), count in sorted(counts.items()):
        account = found.get(tenant)
        if account is None:
            account = found[tenant] = TenantUsage(tenant=tenant)
        if what.startswith(REQUESTS):
            account.requests[what.removeprefix(REQUESTS)] = count
        elif what.startswith(SENT):
            account.kv_bytes.append(SentBytes(source, destination, what.removeprefix(SENT), count))
        else:
            setattr(account, what, count)
    return list(found.values())


def joined(one: Counts, other: Counts) -> dict[Series, int]:
    """Of two states of one run, what it has counted at least."""
    both = dict(one)
    for series, count in other.items():
        if count > both.get(series, 0):
            both[series] = count
    return both


def summed(all_of: Iterable[Counts]) -> dict[Series, int]:
    """What several runs have counted together."""
    sums: dict[Series, int] = {}
    for counts in all_of:
        add(sums, counts)
    return sums


def add(sums: dict[Series, int], counts: Counts) -> None:
    """Adds what one more run has counted."""
    for series, count in counts.items():
        sums[series] = min(MOST, sums.get(series, 0) + count)


def beyond(counts: Counts, base: Counts) -> dict[Series, int]:
    """What was counted since `base`."""
    if not base:
        return dict(counts)
    return {series: count - base.get(series, 0) for series, count in counts.items() if count > base.get(series, 0)}


def largest(accounts: Iterable[TenantUsage], most: int) -> list[TenantUsage]:
    """Those with the most tokens, first, and all others as one, the last."""
    ranked = sorted(accounts, key=lambda each: (-each.prompt_tokens - each.completion_tokens, each.tenant))
    named = [each for each in ranked if each.tenant != OTHER][:most]
    own = {each.tenant for each in named}
    others = counts_of(each for each in ranked if each.tenant not in own)
    return [*named, *accounts_of(summed({(OTHER, *series[1:]): count} for series, count in others.items()))]


def of_the_largest(counts: Counts, most_tenants: int) -> dict[Series, int]:
    """The same sums with so many tenants, those that have used the most; all others are one."""
    used: dict[str, int] = {}
    for (tenant, what, *_), count in counts.items():
        used[tenant] = used.get(tenant, 0) + (0 if what.startswith(SENT) else count)
    named = set(sorted(used, key=lambda tenant: (-used[tenant], tenant))[:most_tenants])
    return summed(
        {(series[0] if series[0] in named else OTHER, *series[1:]): count} for series, count in counts.items()
    )

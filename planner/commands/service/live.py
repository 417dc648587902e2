"""A running plan service, as text: what every command about it shows."""

import argparse
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from planner.commands.rendering.text import table
from planner.decisions.plans.live_plan import LivePlan, PlanSetting
from planner.service.client import PlanClient
from planner.service.status import Status
from planner.solve.control.ledger import LedgerEntry, held
from transport.wire.identity import Identity


def client_of(args: argparse.Namespace) -> PlanClient:
    return PlanClient(args.url, args.token_file, _identity(args.certificate, args.authority))


def _identity(certificate: Path | None, authority: Path | None) -> Identity | None:
    """What is shown to a service that asks for certificates: the one named, with what is beside it.

    That is its key, its authorities, and the list of revoked certificates if there is one.
    """
    if certificate is None:
        return None
    listed = certificate.with_name("authorities")
    beside = listed if listed.exists() else certificate.with_name("authority.pem")
    revoked = certificate.with_name("revoked")
    return Identity(
        certificate=certificate,
        key=certificate.with_suffix(".key"),
        authority=authority or beside,
        revoked=revoked if revoked.exists() else None,
    )


def status_text(status: Status) -> str:
    return "\n".join(_status_lines(status))


def _status_lines(status: Status) -> Iterator[str]:
    state = "another service leads" if status.superseded else f"leads in term {status.term}"
    if status.leads_at:
        state = f"follows {status.leads_at} in term {status.term}"
    yield f"{state}, {status.mode}{', paused' if status.paused else ''}: {status.diagnosis}"
    yield ""
    rows = [_plan_row("in force", status.in_force), _plan_row("proposed", status.proposal)]
    if status.in_force is None and status.found is not None:
        rows[0] = {"": "found", **_setting_cells(status.found), "why": "as gateways are configured"}
    yield table(rows, ("", "version", "threshold", "tie share", "gain", "made", "by", "why"))
    for node, state in status.conversions.items():
        yield f"  {node} -> {_role(status.in_force, node)}: {state}"
    if status.seen is not None:
        seen = status.seen
        yield ""
        yield (
            f"seen: {seen.offered_req_per_s:.3g} req/s, {seen.mean_uncached_tokens:.0f} uncached tokens, answers of "
            f"{seen.mean_output_tokens:.0f}; {seen.num_prfaas} PrfaaS, {seen.num_prefill} prefill (load "
            f"{seen.prefill_load:.2f}), {seen.num_decode} decode (load {seen.decode_load:.2f})"
        )
    for gateway, answer in status.gateways.items():
        yield f"gateway {gateway}: {answer}"
    for reason, count in status.polls_failed.items():
        yield f"questions to gateways that failed, {reason}: {count}"
    for work, count in status.failures.items():
        yield f"unforeseen errors, while {work}: {count}; they are in the log"
    for reason, count in status.turned_away.items():
        yield f"connections that were turned away, {reason}: {count}"


def history_text(entries: list[LedgerEntry]) -> str:
    rows = [
        {
            "at": _when(entry.at),
            "what": entry.change,
            "version": entry.version or None,
            "term": entry.term,
            "threshold": _change(entry),
            "gain": _gain(entry.gain),
            "by": entry.by,
            "why": entry.reason,
        }
        for entry in entries
    ]
    return table(rows, ("at", "what", "version", "term", "threshold", "gain", "by", "why")) if rows else "nothing yet"


def diff_text(status: Status) -> str:
    """The proposal against what holds."""
    now = setting_now(status)
    if status.proposal is None:
        return f"no change is proposed: {status.diagnosis}"
    planned = status.proposal.setting
    lines = [
        f"{name:<20} {before!s:>12} -> {after}" for name, before, after in differences(now, planned) if before != after
    ]
    return "\n".join([*lines, f"version {status.proposal.version}: {status.proposal.reason}"])


def setting_now(status: Status) -> PlanSetting | None:
    """What holds: the plan in force as far as nodes have taken their roles, or what gateways were found with."""
    return status.found if status.in_force is None else held(status.in_force.setting, status.conversions)


def differences(now: PlanSetting | None, planned: PlanSetting) -> list[tuple[str, object, object]]:
    """What differs: name, value now, value planned."""
    before = now or PlanSetting(threshold_tokens=0.0)
    found: list[tuple[str, object, object]] = [
        ("threshold_tokens", before.threshold_tokens if now else "?", planned.threshold_tokens),
        ("tie_share", before.tie_share if now else "?", planned.tie_share),
    ]
    nodes = sorted({*before.roles, *planned.roles})
    found += [(f"role of {node}", before.roles.get(node, "?"), planned.roles.get(node, "as it is")) for node in nodes]
    return [each for each in found if each[1] != each[2]]


def _plan_row(name: str, plan: LivePlan | None) -> Mapping[str, object]:
    if plan is None:
        return {"": name}
    return {
        "": name,
        "version": plan.version,
        **_setting_cells(plan.setting),
        "gain": _gain(plan.gain),
        "made": _when(plan.made_at),
        "by": plan.by,
        "why": plan.reason,
    }


def _setting_cells(setting: PlanSetting) -> Mapping[str, object]:
    return {"threshold": f"{setting.threshold_tokens:g}", "tie share": f"{setting.tie_share:g}"}


def _change(entry: LedgerEntry) -> str | None:
    if entry.after is None:
        return None
    after = f"{entry.after.threshold_tokens:g}"
    return f"{entry.before.threshold_tokens:g} -> {after}" if entry.before is not None else after


def _gain(gain: float) -> str | None:
    return f"{gain:+.1%}" if gain else None


def _when(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _role(plan: LivePlan | None, node: str) -> str:
    return str(plan.setting.roles.get(node, "?")) if plan is not None else "?"

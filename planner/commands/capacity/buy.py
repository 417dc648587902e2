"""`prfaas-plan buy`: GPUs and lines over the months, at least cost within the SLO."""

import argparse

from planner.commands.rendering.output import emit, remark
from planner.commands.rendering.progress import busy
from planner.commands.rendering.purchases import purchases_json, purchases_text
from planner.model.market import load_market
from planner.model.site import load_site
from planner.solve.buying.advice import advise
from planner.solve.problem import SolveOptions


def run(args: argparse.Namespace) -> int:
    site, market = load_site(args.config, args.workload), load_market(args.market)
    if args.output is not None:  # before the search: it names the extra that it needs
        from planner.commands.rendering.purchases_page import purchases_page
    options = SolveOptions(extrapolate=args.extrapolate, survives_cold=not args.warm_caches)
    kinds = {cluster.hardware for cluster in site.clusters}
    for offer in market.hardware:
        if offer.hardware not in kinds:
            remark(f"warning: {args.market}: hardware {offer.hardware!r} is in no cluster of the site: not looked at")
    with busy("comparing ways to serve"):
        advice = advise(site, market, options)
    if args.output is not None:
        args.output.write_text(purchases_page(site, market, advice))
        remark(f"wrote {args.output}")
    result = purchases_json(site, market, advice)
    if args.json:
        emit(result)
        return 0
    print(purchases_text(site, market, advice))
    for assumption in result["assumptions"]:
        remark(f"assumed: {assumption}")
    return 0

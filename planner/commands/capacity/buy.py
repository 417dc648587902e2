"""`prfaas-plan buy`: GPUs and lines over the months, at least cost within the SLO."""

import argparse

from planner.commands.capacity.options import site_of
from planner.commands.rendering.front import front_json, front_text
from planner.commands.rendering.output import emit, remark
from planner.commands.rendering.progress import busy
from planner.commands.rendering.purchases import purchases_json, purchases_text
from planner.model.market import load_market
from planner.solve.buying.advice import advise
from planner.solve.buying.pareto import pareto_front
from planner.solve.problem import SolveOptions


def run(args: argparse.Namespace) -> int:
    site, market = site_of(args), load_market(args.market)
    if args.output is not None:  # before the search: it names the extra that it needs
        from planner.commands.rendering.purchases_page import purchases_page

    options = SolveOptions(extrapolate=args.extrapolate, survives_cold=not args.warm_caches)
    kinds = {cluster.hardware for cluster in site.clusters}
    for offer in market.hardware:
        if offer.hardware not in kinds:
            remark(f"warning: {args.market}: hardware {offer.hardware!r} is in no cluster of the site: not looked at")
    with busy("comparing ways to serve"):
        advice = advise(site, market, options)
    front = None
    if args.pareto:
        with busy("comparing rates and targets"):
            front = pareto_front(site, market, options)
    result = purchases_json(site, market, advice)
    if front is not None:
        result["pareto"] = front_json(market, front)
    if args.json:
        emit(result)
    else:
        print(purchases_text(site, market, advice))
        if front is not None:
            print(f"\n{front_text(market, front)}")
        for assumption in result["assumptions"]:
            remark(f"assumed: {assumption}")
    if args.output is not None:  # last: the answer is there even if this fails
        args.output.write_text(purchases_page(site, market, advice, front))
        remark(f"wrote {args.output}")
    return 0

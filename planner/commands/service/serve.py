"""`prfaas-plan serve`: the plan service, until it is told to stop."""

import argparse
import asyncio
import logging
import signal


def run(args: argparse.Namespace) -> int:
    # Until the service takes it, there is nothing to read again; left alone, it would end the process, and imports take a second.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    from planner.service.config import load
    from planner.service.server import serve

    config = load(args.config)
    if args.check:
        config.model()
        config.token()
        config.peers()
        for warning in config.warnings:
            print(f"{args.config}: warning: {warning}")
        print(f"{args.config}: ok")
        return 0
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    asyncio.run(serve(config, lambda line: print(line, flush=True), lambda: load(args.config)))
    return 0

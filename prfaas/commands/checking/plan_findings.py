"""What `prfaas check` finds about the plan service that a gateway follows: whether it is asked in clear, and who answers."""

import asyncio
import ssl
from typing import Final
from urllib.parse import urlsplit

from gateway.config.gateway import GatewayConfig
from gateway.errors import GatewayConfigError
from prfaas.commands.checking.findings import EXPIRES_SOON_S, Finding, Level
from transport.path.tcp import is_loopback
from transport.wire.asked_servers import trust_of

HANDSHAKE_S: Final = 5.0
ABOUT: Final = "plan service"
RENEW: Final = "prfaas certificates makes a new one; it is read anew"


async def plan_findings(config: GatewayConfig, unix_s: float) -> list[Finding]:
    """Nothing where no service is followed, or one of this machine in clear; nothing is asked beyond a handshake."""
    url = urlsplit(config.plan.url)
    if url.scheme == "https":
        return [await _handshake(config, url.hostname or "", url.port or 443, unix_s)]
    if not config.plan.url or is_loopback(url.hostname or ""):
        return []
    what = f"{config.plan.url} is another machine, and is asked in clear: plans, and its secret"
    remedy = "certificate, key and authority in [plan] have it speak mutual TLS: then its URL begins with https"
    return [Finding(Level.WARNING, ABOUT, what, remedy)]


async def _handshake(config: GatewayConfig, host: str, port: int, unix_s: float) -> Finding:
    about = config.plan.url
    try:
        trust = trust_of(config.plan.asked(config.identity), about)
        async with asyncio.timeout(HANDSHAKE_S):
            _, writer = await asyncio.open_connection(host, port, ssl=trust)
    except ssl.SSLError as error:
        remedy = "is it the plan service, with a planner's certificate of this authority that names its host?"
        return Finding(Level.ERROR, ABOUT, f"{about}: {error.args[-1]}", remedy)
    except (OSError, TimeoutError, GatewayConfigError) as error:
        return Finding(Level.ERROR, ABOUT, f"{about}: no answer: {error or type(error).__name__}", "is it running?")
    shown = writer.get_extra_info("peercert") or {}
    writer.transport.abort()
    left_s = ssl.cert_time_to_seconds(shown["notAfter"]) - unix_s
    level, remedy = (Level.WARNING, RENEW) if left_s < EXPIRES_SOON_S else (Level.OK, "")
    return Finding(level, ABOUT, f"{about} speaks TLS, with a certificate good for {left_s / 86400:.0f} days", remedy)

"""What `prfaas check` finds about access to a gateway: in its file, and by its listeners' TLS."""

import asyncio
import ssl
from collections.abc import Iterator
from pathlib import Path

from gateway.config.gateway import GatewayConfig
from prfaas.commands.findings import Finding, Level
from transport.control.asking import trusting
from transport.path.tcp import format_address

EXPIRES_SOON_S = 14 * 86400.0
HANDSHAKE_S = 5.0
EVERYWHERE = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # and where to ask who listens there


def access_findings(config: GatewayConfig, unix_s: float) -> list[Finding]:
    """What is so of its keys at this time."""
    return [*_about_clear(config), *_about_nameless(config), *_about_ends(config, unix_s)]


async def tls_findings(config: GatewayConfig) -> list[Finding]:
    """Whether its listeners speak TLS with the certificate of its file; nothing is asked beyond that."""
    if config.tls_certificate is None:
        return []
    ports = [port for port in (config.port, config.metrics_port) if port]
    return [await _handshake(config.tls_certificate, EVERYWHERE.get(config.host, config.host), port) for port in ports]


async def _handshake(certificate: Path, host: str, port: int) -> Finding:
    about = format_address(host, port)
    try:
        trust = trusting(certificate, checks_names=False)
        async with asyncio.timeout(HANDSHAKE_S):
            _, writer = await asyncio.open_connection(host, port, ssl=trust)
    except ssl.SSLError as error:
        remedy = "does another process listen there, or is the file newer than what the gateway has taken up?"
        return Finding(Level.ERROR, about, f"no HTTPS with the file's certificate: {error.reason or error}", remedy)
    except (OSError, TimeoutError) as error:
        return Finding(Level.ERROR, about, f"no answer: {error or type(error).__name__}", "is the gateway running?")
    version = writer.get_extra_info("ssl_object").version()
    writer.close()
    return Finding(Level.OK, about, f"speaks HTTPS ({version}) with the file's certificate")


def _about_clear(config: GatewayConfig) -> Iterator[Finding]:
    if config.is_in_clear:
        yield Finding(
            Level.WARNING, "https", f"{config.host}: prompts, answers and keys of other machines come in clear",
            "tls_certificate and tls_key encrypt them; plain_api = true says that something before the gateway does",
        )  # fmt: skip


def _about_nameless(config: GatewayConfig) -> Iterator[Finding]:
    if config.operator_keys:
        what = f"{len(config.operator_keys)} operator_keys have no name: each may do all, as operator-N"
        yield Finding(
            Level.WARNING, "operators", what, "prfaas key NAME --operator ROLE makes one for [[gateway.operators]]"
        )


def _about_ends(config: GatewayConfig, unix_s: float) -> Iterator[Finding]:
    ends = {f"operator {each.name}": each.expires for each in config.all_operators}
    ends |= {f"tenant {name}": each.expires for name, each in config.tenants.items()}
    for whose, moment in ends.items():
        if moment is None:
            continue
        left_s = moment.timestamp() - unix_s
        if left_s <= 0:
            yield Finding(
                Level.WARNING, whose, f"keys have expired on {moment:%Y-%m-%d}", "prfaas key makes another one"
            )
        elif left_s < EXPIRES_SOON_S:
            what = f"keys expire in {left_s / 86400:.0f} days"
            yield Finding(Level.WARNING, whose, what, "prfaas key makes another one; both hold until then")

"""What a command reads to ask nodes: the gateway's file, and the certificate that it shows to them."""

from dataclasses import replace
from pathlib import Path

from gateway.config.gateway import GatewayConfig, load
from gateway.errors import GatewayConfigError
from prfaas.errors import ConversionError
from prfaas.system.certificates import OPERATOR_NAME
from transport.wire.identity import Identity


def gateway_of(file: Path) -> GatewayConfig:
    """Raises GatewayConfigError, which says of a missing file how to name another."""
    try:
        return load(file)
    except GatewayConfigError as error:
        if file.exists():
            raise
        raise GatewayConfigError(f"{error}; -c names the gateway's file (`prfaas up` writes one)") from error


def operator_identity(config: GatewayConfig, named: Path | None) -> Identity | None:
    """The one named, with its key beside it, else operator.pem beside the gateway's; else the gateway's own.

    None where nodes ask for no certificate. Raises ConversionError for files that cannot be used.
    """
    identity = config.identity
    if identity is None:
        return None
    beside = identity.certificate.with_name(f"{OPERATOR_NAME}.pem")
    chosen = named or (beside if beside.exists() else None)
    if chosen is not None:
        identity = replace(identity, certificate=chosen, key=chosen.with_suffix(".key"))
    try:
        identity.check()
    except OSError as error:
        raise ConversionError(str(error)) from error
    return identity

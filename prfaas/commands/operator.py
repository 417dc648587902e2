"""Which certificate a command shows to nodes that drain and convert for operators only."""

from dataclasses import replace
from pathlib import Path

from gateway.config.gateway import GatewayConfig
from prfaas.errors import ConversionError
from prfaas.system.certificates import OPERATOR_NAME
from transport.wire.identity import Identity


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

"""Certificates of a site as its files name them, and what START.md says of the authorities that signed them."""

from collections.abc import Sequence

from prfaas.system.certificates import OPERATOR_NAME, REVOKED
from prfaas.system.site_authorities import AUTHORITIES, AUTHORITY
from transport.peers.name import NO_CLUSTER

CERTIFICATES = "certificates"


def identity_files(name: str, *, one_authority: bool) -> dict[str, str]:
    """Keys of a configuration and their files: `name`'s own, and whom it believes."""
    authority = AUTHORITY if one_authority else AUTHORITIES
    files = {"certificate": f"{name}.pem", "key": f"{name}.key", "authority": authority, "revoked": REVOKED}
    return {key: f"{CERTIFICATES}/{file}" for key, file in files.items()}


def authority_lines(clusters: Sequence[str], *, one_authority: bool) -> list[str]:
    """What every machine needs, and what none may be given."""
    folders = [""] if one_authority else [f"{cluster}/" for cluster in (NO_CLUSTER, *clusters)]
    public = [f"{folder}{AUTHORITY}" for folder in folders]
    needed = [*([] if one_authority else [AUTHORITIES]), *public, REVOKED]
    secret = [f"{folder}authority.key" for folder in folders]
    lines = [
        f"Each machine also needs {_quoted(needed)}.",
        f"Never copy {_quoted(secret)}: with one of them, certificates are signed.",
    ]
    if not one_authority:
        lines.append(
            f"Each signs for its own cluster: give it to the operators of that cluster. Keep the one of `{NO_CLUSTER}`, which"
            " signs for gateways and operators."
        )
    return [*lines, f"Keep `{CERTIFICATES}/{OPERATOR_NAME}.key` with operators: it drains and converts nodes."]


def _quoted(files: Sequence[str]) -> str:
    return ", ".join(f"`{CERTIFICATES}/{file}`" for file in files)

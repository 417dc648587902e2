"""What gRPC is told by the environment. It reads it once, when it is imported: so this module imports nothing of it."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

CIPHER_SUITES: Final = "GRPC_SSL_CIPHER_SUITES"
SETTINGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        # Its fork handlers crash children that other libraries of a process may start.
        "GRPC_ENABLE_FORK_SUPPORT": "0",
        # It has no setting for the oldest TLS that it takes. Of TLS 1.2 this leaves it a cipher for keys agreed on beforehand.
        # No end of ours has such keys, so no handshake of TLS 1.2 succeeds. The ciphers of TLS 1.3 are not touched.
        CIPHER_SUITES: "ECDHE-PSK-CHACHA20-POLY1305",
    }
)


def for_grpc(environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to an environment before gRPC is imported. What it says already holds."""
    return {key: value for key, value in SETTINGS.items() if key not in environment}

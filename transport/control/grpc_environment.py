"""What gRPC is told by the environment. It reads it once, when it is imported: so this module imports nothing of it."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

SETTINGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        # Its fork handlers crash children that other libraries of a process may start.
        "GRPC_ENABLE_FORK_SUPPORT": "0",
    }
)


def for_grpc(environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to an environment before gRPC is imported. What it says already holds."""
    return {key: value for key, value in SETTINGS.items() if key not in environment}

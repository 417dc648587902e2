"""A server's settings from its environment: SGLang has none of its own for a transfer backend."""

from typing import Final

SOCKET: Final = "PRFAAS_AGENT_SOCKET"
CONTROL: Final = "PRFAAS_AGENT_CONTROL"  # of a server that decodes
REVISION: Final = "PRFAAS_MODEL_REVISION"

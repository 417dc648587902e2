"""Names of headers and metadata that proxies, clients and llm-d's servers know a picker by."""

from collections.abc import Mapping
from typing import Final

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"

DESTINATION: Final = "x-gateway-destination-endpoint"
NAMESPACE: Final = "envoy.lb"  # of the metadata that has the destination, too
SERVED: Final = "x-gateway-destination-endpoint-served"
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
SUBSET: Final = "x-gateway-destination-endpoint-subset"

PREFILLER: Final = "x-prefiller-host-port"
# By these, too, llm-d's sidecars are told whom to ask. A picker names none, and a client must not.
SIDECARS: Final = ("x-encoder-hosts-ports", "x-data-parallel-host-port", "x-kv-cache-source-host-port")
DROPPED: Final = "x-llm-d-request-dropped-reason"
# The names that hold, and those before them.
FAIRNESS: Final = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
OBJECTIVE: Final = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
SLO_TTFT_MS: Final = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")

SATURATED: Final = "rejected-saturated"
NO_ENDPOINTS: Final = "rejected-no-endpoints"
SHUTTING_DOWN: Final = "rejected-shutting-down"


def first_of(headers: Mapping[str, str], names: tuple[str, ...]) -> str:
    """The value of the first header that is there; "" without one."""
    return next((value for name in names if (value := headers.get(name))), "")

"""Envoy's configurations: what each proxy does with bodies, how it finds a server, whom it asks."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

TYPES: Final = "type.googleapis.com/envoy.extensions"
DESTINATION: Final = "x-gateway-destination-endpoint"
FILE: Final = Path(__file__).parents[2] / "deploy" / "envoy" / "envoy.yaml"
DUPLEX: Final = "FULL_DUPLEX_STREAMED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a proxy works with its picker. `balancing`: `original` destinations, or `override` among known servers.

    Without `asks` no picker is asked. `subset` is the hint that each request carries.
    """

    request: str = "BUFFERED"
    response: str = "NONE"
    heads: bool = False  # of responses are told
    balancing: str = "override"
    fails_open: bool = False
    retries: int = 0
    subset: tuple[str, ...] | None = None
    asks: bool = True
    is_shipped: bool = False  # deploy/envoy itself: nothing else counts


SHIPPED: Final = Way(is_shipped=True)
OWN: Final = Way(fails_open=True, retries=2)  # deploy/envoy
STANDARD: Final = Way(
    request=DUPLEX, response=DUPLEX, heads=True, balancing="original"
)  # the Gateway API's proposal 004


def configuration(way: Way, *, port: int, admin: int, picker: str, servers: tuple[str, ...]) -> str:
    """A whole file of Envoy's."""
    if way.is_shipped:
        return _shipped(port, admin, picker, servers)
    filters = [_router()]
    if way.asks:
        filters.insert(0, _asking(way))
    if way.subset is not None:
        filters.insert(0, _hinting(way.subset))
    route: dict[str, Any] = {"cluster": "servers", "timeout": "0s"}
    if way.retries:
        route["retry_policy"] = {"retry_on": "connect-failure,refused-stream", "num_retries": way.retries}
    manager = {
        "@type": f"{TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "api",
        "route_config": {
            "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": route}]}]
        },
        "http_filters": filters,
    }
    listener = {
        "name": "api",
        "address": _address("127.0.0.1", port),
        "per_connection_buffer_limit_bytes": 32 << 20,
        "filter_chains": [{"filters": [_named("envoy.filters.network.http_connection_manager", manager)]}],
    }
    return json.dumps(
        {
            "admin": {"address": _address("127.0.0.1", admin)},
            "static_resources": {"listeners": [listener], "clusters": [_servers(way, servers), _picker(picker)]},
        }
    )


def _shipped(port: int, admin: int, picker: str, servers: tuple[str, ...]) -> str:
    told = FILE.read_text()
    addresses = zip((8080, 9901, 9002, 8000, 8001), (str(port), str(admin), picker, *servers), strict=True)
    for written, address in addresses:
        assert f"port_value: {written}}}" in told
        told = told.replace(f"port_value: {written}}}", f"port_value: {address.rpartition(':')[2]}}}")
    return told


def _asking(way: Way) -> dict[str, Any]:
    trailers = {True: "SEND", False: "SKIP"}
    return _named(
        "envoy.filters.http.ext_proc",
        {
            "@type": f"{TYPES}.filters.http.ext_proc.v3.ExternalProcessor",
            "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
            "failure_mode_allow": way.fails_open,
            "message_timeout": "1000s",
            "processing_mode": {
                "request_header_mode": "SEND",
                "request_body_mode": way.request,
                "request_trailer_mode": trailers[way.request == DUPLEX],
                "response_header_mode": trailers[way.heads],
                "response_body_mode": way.response,
                "response_trailer_mode": trailers[way.response == DUPLEX],
            },
            "metadata_options": {
                "receiving_namespaces": {"untyped": ["envoy.lb"]},
                "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
            },
        },
    )


def _hinting(subset: tuple[str, ...]) -> dict[str, Any]:
    value = {"x-gateway-destination-endpoint-subset": list(subset)}
    return _named(
        "envoy.filters.http.set_metadata",
        {
            "@type": f"{TYPES}.filters.http.set_metadata.v3.Config",
            "metadata": [{"metadata_namespace": "envoy.lb.subset_hint", "value": value}],
        },
    )


def _router() -> dict[str, Any]:
    return _named(
        "envoy.filters.http.router",
        {"@type": f"{TYPES}.filters.http.router.v3.Router", "suppress_envoy_headers": True},
    )


def _servers(way: Way, servers: tuple[str, ...]) -> dict[str, Any]:
    cluster: dict[str, Any] = {"name": "servers", "connect_timeout": "1s"}
    if way.balancing == "original":
        named = {"use_http_header": True, "http_header_name": DESTINATION}
        return {**cluster, "type": "ORIGINAL_DST", "lb_policy": "CLUSTER_PROVIDED", "original_dst_lb_config": named}
    cluster |= {"type": "STATIC", "load_assignment": _assignment("servers", servers)}
    if not way.asks:
        return cluster
    any_of_them = _named(
        "envoy.load_balancing_policies.round_robin",
        {"@type": f"{TYPES}.load_balancing_policies.round_robin.v3.RoundRobin"},
    )
    override = {
        "@type": f"{TYPES}.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [{"metadata": {"key": "envoy.lb", "path": [{"key": DESTINATION}]}}],
        "fallback_policy": {"policies": [{"typed_extension_config": any_of_them}]},
    }
    policy = _named("envoy.load_balancing_policies.override_host", override)
    return {**cluster, "load_balancing_policy": {"policies": [{"typed_extension_config": policy}]}}


def _picker(address: str) -> dict[str, Any]:
    options = {
        "@type": f"{TYPES}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    return {
        "name": "picker",
        "type": "STATIC",
        "connect_timeout": "1s",
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options},
        "load_assignment": _assignment("picker", (address,)),
    }


def _assignment(name: str, addresses: tuple[str, ...]) -> dict[str, Any]:
    hosts = [(host, int(port)) for host, _, port in (each.rpartition(":") for each in addresses)]
    return {
        "cluster_name": name,
        "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(*host)}} for host in hosts]}],
    }


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def _named(name: str, config: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "typed_config": config}

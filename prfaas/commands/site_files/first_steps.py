"""What START.md says beside its table: what a firewall between clusters lets through, and what to ask first."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

INSTALLED: Final = "Each machine needs PrfaaS: docs/guides/two-sites.md says how to install it."
ASKED: Final = ("control_port", "calls_port", "engine_port", "bootstrap_port")


@dataclass(frozen=True, slots=True)
class NodePorts:
    """Where a node answers: `asked` by gateways and decode nodes of the other cluster, `landing` for KVCache."""

    host: str
    asked: tuple[int, ...]
    landing: int

    @classmethod
    def of(cls, host: str, ports: Mapping[str, tuple[int, str]], nth: int) -> "NodePorts":
        """Of the `nth` node of its machine. `ports` are of the first one, by their keys."""
        numbers = {name: port + nth for name, (port, _) in ports.items()}
        return cls(host, tuple(numbers[name] for name in ASKED if name in numbers), numbers["transfer_port"])


def firewall_lines(gateway: str, away: Sequence[NodePorts], home: Sequence[NodePorts]) -> list[str]:
    """Connections between the clusters; none where a machine has nodes of both, as on one site."""
    inside = {gateway, *(node.host for node in home)}
    outside = list(dict.fromkeys(node.host for node in away if node.host not in inside))
    if not outside:
        return []
    lines = ["A firewall between the clusters must let these connections through:", ""]
    lines += [f"- from {gateway} to {node.host}: {_listed(node.asked)}" for node in away if node.host in outside]
    lines += [f"- from {host} to {node.host}: {node.landing}" for host in outside for node in home]
    return [*lines, ""]


def question_lines(gateway: str, url: str, authority: str, *, has_keys: bool) -> list[str]:
    """The check, and a first request."""
    trust = f"--cacert {authority} " if url.startswith("https") else ""
    key = "-H 'Authorization: Bearer KEY' " if has_keys else ""
    lines = [
        f"When all of it runs, `prfaas check -c gateway.toml` on {gateway} asks every node whether it fits the others.",
        "Then ask for the models" + (", with the API key that `prfaas init` printed:" if has_keys else ":"),
    ]
    return [*lines, "", f"    curl {trust}{key}{url}/v1/models"]


def _listed(ports: Sequence[int]) -> str:
    return ", ".join(map(str, ports))

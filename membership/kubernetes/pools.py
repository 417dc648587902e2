"""Which Pods an InferencePool chooses, and where their model servers answer: nothing here waits."""

from dataclasses import dataclass
from typing import Final

from membership.errors import KubernetesFailed
from membership.kubernetes.objects import InferencePool
from membership.kubernetes.settings import MAX_SELECTOR_CHARS

MAX_PORTS: Final = 8  # as the API has it


@dataclass(frozen=True, slots=True)
class PoolChoice:
    """A label selector, and the ports of each Pod that it chooses."""

    selector: str
    ports: tuple[int, ...]


def choice_of(pool: InferencePool) -> PoolChoice:
    """What a pool says. Raises KubernetesFailed for one that chooses nothing, or everything."""
    where = f"InferencePool {pool.metadata.namespace}/{pool.metadata.name}"
    labels = pool.spec.selector.match_labels or {}
    selector = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
    if not 0 < len(selector) <= MAX_SELECTOR_CHARS:
        raise KubernetesFailed("malformed", f"{where}: matchLabels: must be 1 to {MAX_SELECTOR_CHARS} characters")
    ports = tuple(port.number for port in pool.spec.target_ports or ())
    if not 0 < len(ports) <= MAX_PORTS or not all(0 < port < 65536 for port in ports):
        raise KubernetesFailed("malformed", f"{where}: targetPorts: must be 1 to {MAX_PORTS} ports")
    return PoolChoice(selector, ports)

"""What a Pod says of a node: nothing here waits, and one Pod gives the same answer in every gateway."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from membership.documents import (
    CLUSTER_LABEL,
    NOT_OURS,
    OWN_ROLE_LABEL,
    OWN_ROLES,
    PORT_LABEL,
    REVISION_LABEL,
    ROLE_LABEL,
)
from membership.kubernetes.objects import Pod
from membership.member import Member
from transport.control.settings import SettingsError

OWN: Final = "prfaas/"  # before the names of our own labels and annotations
ID_LABEL: Final = f"{OWN}node-id"
NAME_LABEL: Final = f"{OWN}certificate-name"
SUBDOMAIN_LABEL: Final = f"{OWN}certificate-subdomain"  # where certificates cannot carry the name of the Pod's service
CONTROL_PORT: Final = "control"  # a container's port of that name is the agent's
TOLD: Final = (f"{OWN}layout", f"{OWN}capacity", f"{OWN}pool", f"{OWN}rack")  # what is shown of a node besides
TOPOLOGY: Final = "topology.kubernetes.io/"
MACHINE_LABEL: Final = "kubernetes.io/hostname"
COMBINED_ROLES: Final = ("prefill-decode", "encode-prefill", "encode-decode", "encode-prefill-decode")
ENDED: Final = ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True)
class UnusablePod:
    """A Pod that is not taken: `reason` is a label, `text` names the Pod."""

    reason: str
    text: str


def is_ending(pod: Pod) -> bool:
    """Whether it has been told to end, or has ended."""
    return pod.metadata.deletion_timestamp is not None or pod.status.phase in ENDED


def is_ready(pod: Pod) -> bool:
    """Whether its Ready condition says so."""
    return any(each.type == "Ready" and each.status == "True" for each in pod.status.conditions or ())


def members_of(pod: Pod, agent_port: int = 0, server_ports: Sequence[int] = ()) -> tuple[Member | UnusablePod, ...]:
    """The node in a Pod, or its model servers: one for each of `server_ports`. Several are told apart by their ranks."""
    if len(server_ports) < 2:
        return (member_of(pod, agent_port, next(iter(server_ports), 0)),)
    found: list[Member | UnusablePod] = []
    for rank, port in enumerate(server_ports):
        server = member_of(pod, agent_port, port)
        if isinstance(server, UnusablePod):
            return (server,)
        found.append(replace(server, id=f"{server.id}-rank-{rank}"))
    return tuple(found)


def member_of(pod: Pod, agent_port: int = 0, server_port: int = 0) -> Member | UnusablePod:
    """The node that runs in a Pod with an address. An annotation counts before a label of the same name.

    A role that combines two is for the agent to say. With a `server_port`, Pods are model servers that answer there: what
    they say of an agent does not count.
    """
    where = f"{pod.metadata.namespace}/{pod.metadata.name}"
    labels, annotations = pod.metadata.labels or {}, pod.metadata.annotations or {}
    said = {**labels, **{key: value for key, value in annotations.items() if key.startswith(OWN)}}
    role = said.get(OWN_ROLE_LABEL) or labels.get(ROLE_LABEL, "")
    if role == NOT_OURS:
        return UnusablePod("encode_only", f"{where}: it only encodes, which no node of ours does")
    if role and role not in (*OWN_ROLES, *COMBINED_ROLES):
        return UnusablePod(
            "role", f"{where}: its role is {role!r}: must be one of {', '.join(OWN_ROLES)}, or combine them"
        )
    port = server_port or said.get(PORT_LABEL) or _control_port(pod) or agent_port
    if not port:
        return UnusablePod(
            "port", f"{where}: where is its agent? It needs a port named {CONTROL_PORT}, or the annotation {PORT_LABEL}"
        )
    host = pod.status.pod_ip
    told = _labels(pod, said, role)
    if server_port and OWN_ROLE_LABEL in said:  # by which pickers know a node of ours from other servers
        told[OWN_ROLE_LABEL] = role
    try:
        return Member(
            id=said.get(ID_LABEL) or pod.metadata.name,
            agent=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
            name=said.get(NAME_LABEL) or _name(pod, said.get(SUBDOMAIN_LABEL, "")),
            cluster=said.get(CLUSTER_LABEL, ""),
            role=role if role in OWN_ROLES else "",
            revision=said.get(REVISION_LABEL, ""),
            labels=told,
        )
    except SettingsError as error:
        return UnusablePod("malformed", f"{where}: {error}")


def _control_port(pod: Pod) -> int:
    """0 where no container has a port of that name."""
    ports = (port for container in pod.spec.containers for port in container.ports or ())
    return next((port.container_port for port in ports if port.name == CONTROL_PORT), 0)


def _name(pod: Pod, said_subdomain: str) -> str:
    """The name that its certificate carries: that in the DNS of its headless service, unless the Pod says another subdomain.
    "" without either.
    """
    subdomain = said_subdomain or pod.spec.subdomain
    if not pod.spec.hostname or not subdomain:
        return ""
    return f"{pod.spec.hostname}.{subdomain}.{pod.metadata.namespace}.svc"


def _labels(pod: Pod, said: Mapping[str, str], role: str) -> dict[str, str]:
    told = {key: value for key, value in said.items() if key in TOLD or key.startswith(TOPOLOGY)}
    if role in COMBINED_ROLES:
        told[ROLE_LABEL] = role
    if pod.spec.node_name:
        told[MACHINE_LABEL] = pod.spec.node_name
    return told

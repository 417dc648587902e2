"""What is read of the API server's objects: the fields that say something of a node, and no others."""

from collections.abc import Mapping, Sequence
from typing import Final, Generic, TypeVar

import msgspec

T = TypeVar("T")

GONE: Final = 410
MAX_MESSAGE_CHARS: Final = 300


class Metadata(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """`deletion_timestamp` is set from the moment at which the object is told to end."""

    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None
    labels: Mapping[str, str] | None = None
    annotations: Mapping[str, str] | None = None


class ContainerPort(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    container_port: int
    name: str = ""


class Container(msgspec.Struct, frozen=True, kw_only=True):
    ports: Sequence[ContainerPort] | None = None


class PodSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """`hostname` and `subdomain` are the Pod's name in the DNS of a headless service."""

    containers: Sequence[Container] = ()
    hostname: str = ""
    subdomain: str = ""
    node_name: str = ""


class PodCondition(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    status: str


class PodStatus(msgspec.Struct, frozen=True, kw_only=True):
    phase: str = ""
    pod_ip: str = msgspec.field(default="", name="podIP")
    conditions: Sequence[PodCondition] | None = None


class Pod(msgspec.Struct, frozen=True, kw_only=True):
    metadata: Metadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


class TargetRef(msgspec.Struct, frozen=True, kw_only=True):
    kind: str = ""
    uid: str = ""


class EndpointConditions(msgspec.Struct, frozen=True, kw_only=True):
    """`serving` is `ready` even of services that publish addresses of Pods that are not ready."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class ServiceEndpoint(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    conditions: EndpointConditions = EndpointConditions()
    target_ref: TargetRef | None = None


class EndpointSlice(msgspec.Struct, frozen=True, kw_only=True):
    metadata: Metadata
    endpoints: Sequence[ServiceEndpoint] | None = None


class PoolSelector(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    match_labels: Mapping[str, str] | None = None


class TargetPort(msgspec.Struct, frozen=True, kw_only=True):
    number: int


class PoolSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Each Pod has a model server at each of the `target_ports`."""

    selector: PoolSelector = PoolSelector()
    target_ports: Sequence[TargetPort] | None = None


class InferencePool(msgspec.Struct, frozen=True, kw_only=True):
    """Of the Gateway API's inference extension, v1."""

    metadata: Metadata
    spec: PoolSpec = PoolSpec()


class ListMetadata(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """`continue_` is the token of the next page, "" on the last one."""

    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class Page(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    metadata: ListMetadata
    items: Sequence[T] | None = None


class ApiStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A refusal, in the API server's words."""

    message: str = ""
    reason: str = ""
    code: int = 0


class BookmarkMetadata(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    resource_version: str = ""


class Bookmark(msgspec.Struct, frozen=True, kw_only=True):
    """How far a watch has come, though nothing of it has changed."""

    metadata: BookmarkMetadata


class RawEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a watch. What `object` is, `type` says."""

    type: str
    object: msgspec.Raw


def shown(text: str) -> str:
    """A peer's words, printable and not at any length."""
    printable = "".join(letter if letter.isprintable() else " " for letter in text[:MAX_MESSAGE_CHARS])
    return printable if len(text) <= MAX_MESSAGE_CHARS else f"{printable}..."

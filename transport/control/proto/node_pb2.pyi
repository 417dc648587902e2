from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NodeState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_STATE_UNSPECIFIED: _ClassVar[NodeState]
    NODE_STATE_STARTING: _ClassVar[NodeState]
    NODE_STATE_READY: _ClassVar[NodeState]
    NODE_STATE_DRAINING: _ClassVar[NodeState]
    NODE_STATE_ENGINE_DOWN: _ClassVar[NodeState]
    NODE_STATE_CONVERTING: _ClassVar[NodeState]
    NODE_STATE_ENGINE_SILENT: _ClassVar[NodeState]

class Medium(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEDIUM_UNSPECIFIED: _ClassVar[Medium]
    MEDIUM_MEMORY: _ClassVar[Medium]
    MEDIUM_SSD: _ClassVar[Medium]
    MEDIUM_ENGINE: _ClassVar[Medium]

class ConversionPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONVERSION_PHASE_UNSPECIFIED: _ClassVar[ConversionPhase]
    CONVERSION_PHASE_STEADY: _ClassVar[ConversionPhase]
    CONVERSION_PHASE_DRAINING: _ClassVar[ConversionPhase]
    CONVERSION_PHASE_VERIFYING: _ClassVar[ConversionPhase]
NODE_STATE_UNSPECIFIED: NodeState
NODE_STATE_STARTING: NodeState
NODE_STATE_READY: NodeState
NODE_STATE_DRAINING: NodeState
NODE_STATE_ENGINE_DOWN: NodeState
NODE_STATE_CONVERTING: NodeState
NODE_STATE_ENGINE_SILENT: NodeState
MEDIUM_UNSPECIFIED: Medium
MEDIUM_MEMORY: Medium
MEDIUM_SSD: Medium
MEDIUM_ENGINE: Medium
CONVERSION_PHASE_UNSPECIFIED: ConversionPhase
CONVERSION_PHASE_STEADY: ConversionPhase
CONVERSION_PHASE_DRAINING: ConversionPhase
CONVERSION_PHASE_VERIFYING: ConversionPhase

class DescribeRequest(_message.Message):
    __slots__ = ("check_integrity",)
    CHECK_INTEGRITY_FIELD_NUMBER: _ClassVar[int]
    check_integrity: bool
    def __init__(self, check_integrity: _Optional[bool] = ...) -> None: ...

class NodeDescription(_message.Message):
    __slots__ = ("node_id", "cluster", "cluster_kind", "role", "state", "engine_url", "model_id", "layout_json", "layout_fingerprint", "block_size", "max_model_len", "load", "pool", "integrity_error", "boot_id", "engine_pid", "ssd", "contexts", "conversion", "calls_port", "version", "wall_clock_s", "not_done_json", "adapters", "takes_media", "rooms", "plain", "name_secrets", "own_cache", "rdma_direct")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_KIND_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_URL_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_JSON_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    INTEGRITY_ERROR_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_PID_FIELD_NUMBER: _ClassVar[int]
    SSD_FIELD_NUMBER: _ClassVar[int]
    CONTEXTS_FIELD_NUMBER: _ClassVar[int]
    CONVERSION_FIELD_NUMBER: _ClassVar[int]
    CALLS_PORT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WALL_CLOCK_S_FIELD_NUMBER: _ClassVar[int]
    NOT_DONE_JSON_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    TAKES_MEDIA_FIELD_NUMBER: _ClassVar[int]
    ROOMS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_FIELD_NUMBER: _ClassVar[int]
    NAME_SECRETS_FIELD_NUMBER: _ClassVar[int]
    OWN_CACHE_FIELD_NUMBER: _ClassVar[int]
    RDMA_DIRECT_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    cluster: str
    cluster_kind: str
    role: str
    state: NodeState
    engine_url: str
    model_id: str
    layout_json: str
    layout_fingerprint: str
    block_size: int
    max_model_len: int
    load: Load
    pool: PoolReport
    integrity_error: str
    boot_id: str
    engine_pid: int
    ssd: SsdReport
    contexts: _containers.RepeatedCompositeFieldContainer[Context]
    conversion: Conversion
    calls_port: int
    version: str
    wall_clock_s: float
    not_done_json: str
    adapters: _containers.RepeatedScalarFieldContainer[str]
    takes_media: bool
    rooms: Rooms
    plain: _containers.RepeatedScalarFieldContainer[str]
    name_secrets: _containers.RepeatedScalarFieldContainer[str]
    own_cache: bool
    rdma_direct: bool
    def __init__(self, node_id: _Optional[str] = ..., cluster: _Optional[str] = ..., cluster_kind: _Optional[str] = ..., role: _Optional[str] = ..., state: _Optional[_Union[NodeState, str]] = ..., engine_url: _Optional[str] = ..., model_id: _Optional[str] = ..., layout_json: _Optional[str] = ..., layout_fingerprint: _Optional[str] = ..., block_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., pool: _Optional[_Union[PoolReport, _Mapping]] = ..., integrity_error: _Optional[str] = ..., boot_id: _Optional[str] = ..., engine_pid: _Optional[int] = ..., ssd: _Optional[_Union[SsdReport, _Mapping]] = ..., contexts: _Optional[_Iterable[_Union[Context, _Mapping]]] = ..., conversion: _Optional[_Union[Conversion, _Mapping]] = ..., calls_port: _Optional[int] = ..., version: _Optional[str] = ..., wall_clock_s: _Optional[float] = ..., not_done_json: _Optional[str] = ..., adapters: _Optional[_Iterable[str]] = ..., takes_media: _Optional[bool] = ..., rooms: _Optional[_Union[Rooms, _Mapping]] = ..., plain: _Optional[_Iterable[str]] = ..., name_secrets: _Optional[_Iterable[str]] = ..., own_cache: _Optional[bool] = ..., rdma_direct: _Optional[bool] = ...) -> None: ...

class Rooms(_message.Message):
    __slots__ = ("host", "port")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    host: str
    port: int
    def __init__(self, host: _Optional[str] = ..., port: _Optional[int] = ...) -> None: ...

class SsdReport(_message.Message):
    __slots__ = ("capacity_bytes", "blocks", "bytes", "queued_bytes", "events", "promotions", "open")
    class EventsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class PromotionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    QUEUED_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    PROMOTIONS_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    capacity_bytes: int
    blocks: int
    bytes: int
    queued_bytes: int
    events: _containers.ScalarMap[str, int]
    promotions: _containers.ScalarMap[str, int]
    open: bool
    def __init__(self, capacity_bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., queued_bytes: _Optional[int] = ..., events: _Optional[_Mapping[str, int]] = ..., promotions: _Optional[_Mapping[str, int]] = ..., open: _Optional[bool] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running", "waiting", "queued_tokens", "sending", "landing", "egress_bytes_total", "ingress_bytes_total", "links", "slots", "steps", "room", "clock_s", "budgets", "booked_by_others", "booked_by_own")
    class BudgetsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SENDING_FIELD_NUMBER: _ClassVar[int]
    LANDING_FIELD_NUMBER: _ClassVar[int]
    EGRESS_BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    INGRESS_BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    CLOCK_S_FIELD_NUMBER: _ClassVar[int]
    BUDGETS_FIELD_NUMBER: _ClassVar[int]
    BOOKED_BY_OTHERS_FIELD_NUMBER: _ClassVar[int]
    BOOKED_BY_OWN_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    queued_tokens: int
    sending: int
    landing: int
    egress_bytes_total: int
    ingress_bytes_total: int
    links: _containers.RepeatedCompositeFieldContainer[Link]
    slots: int
    steps: _containers.RepeatedCompositeFieldContainer[StepTime]
    room: Room
    clock_s: float
    budgets: _containers.ScalarMap[str, float]
    booked_by_others: int
    booked_by_own: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., sending: _Optional[int] = ..., landing: _Optional[int] = ..., egress_bytes_total: _Optional[int] = ..., ingress_bytes_total: _Optional[int] = ..., links: _Optional[_Iterable[_Union[Link, _Mapping]]] = ..., slots: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[StepTime, _Mapping]]] = ..., room: _Optional[_Union[Room, _Mapping]] = ..., clock_s: _Optional[float] = ..., budgets: _Optional[_Mapping[str, float]] = ..., booked_by_others: _Optional[int] = ..., booked_by_own: _Optional[int] = ...) -> None: ...

class StepTime(_message.Message):
    __slots__ = ("batch", "seconds")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    batch: float
    seconds: float
    def __init__(self, batch: _Optional[float] = ..., seconds: _Optional[float] = ...) -> None: ...

class Room(_message.Message):
    __slots__ = ("pages_total", "pages_free", "pages_evictable", "free_tokens", "tokens")
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    PAGES_EVICTABLE_FIELD_NUMBER: _ClassVar[int]
    FREE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    pages_total: int
    pages_free: int
    pages_evictable: int
    free_tokens: int
    tokens: int
    def __init__(self, pages_total: _Optional[int] = ..., pages_free: _Optional[int] = ..., pages_evictable: _Optional[int] = ..., free_tokens: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class Link(_message.Message):
    __slots__ = ("peer", "available_bytes_per_s", "goodput_bytes_per_s", "utilisation", "retransmit_ratio", "rtt_s", "min_rtt_s", "queued_bytes", "connections", "bytes_total", "retransmitted_bytes_total", "budget_bytes_per_s", "congested", "estimate_error", "inflated", "own_budget_bytes_per_s")
    PEER_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    GOODPUT_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    UTILISATION_FIELD_NUMBER: _ClassVar[int]
    RETRANSMIT_RATIO_FIELD_NUMBER: _ClassVar[int]
    RTT_S_FIELD_NUMBER: _ClassVar[int]
    MIN_RTT_S_FIELD_NUMBER: _ClassVar[int]
    QUEUED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    RETRANSMITTED_BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    CONGESTED_FIELD_NUMBER: _ClassVar[int]
    ESTIMATE_ERROR_FIELD_NUMBER: _ClassVar[int]
    INFLATED_FIELD_NUMBER: _ClassVar[int]
    OWN_BUDGET_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    peer: str
    available_bytes_per_s: float
    goodput_bytes_per_s: float
    utilisation: float
    retransmit_ratio: float
    rtt_s: float
    min_rtt_s: float
    queued_bytes: int
    connections: int
    bytes_total: int
    retransmitted_bytes_total: int
    budget_bytes_per_s: float
    congested: bool
    estimate_error: float
    inflated: bool
    own_budget_bytes_per_s: float
    def __init__(self, peer: _Optional[str] = ..., available_bytes_per_s: _Optional[float] = ..., goodput_bytes_per_s: _Optional[float] = ..., utilisation: _Optional[float] = ..., retransmit_ratio: _Optional[float] = ..., rtt_s: _Optional[float] = ..., min_rtt_s: _Optional[float] = ..., queued_bytes: _Optional[int] = ..., connections: _Optional[int] = ..., bytes_total: _Optional[int] = ..., retransmitted_bytes_total: _Optional[int] = ..., budget_bytes_per_s: _Optional[float] = ..., congested: _Optional[bool] = ..., estimate_error: _Optional[float] = ..., inflated: _Optional[bool] = ..., own_budget_bytes_per_s: _Optional[float] = ...) -> None: ...

class PoolReport(_message.Message):
    __slots__ = ("pages_total", "pages_free", "pages_prefix", "pages_transfer", "pages_locked", "reservations", "page_bytes")
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    PAGES_PREFIX_FIELD_NUMBER: _ClassVar[int]
    PAGES_TRANSFER_FIELD_NUMBER: _ClassVar[int]
    PAGES_LOCKED_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    pages_total: int
    pages_free: int
    pages_prefix: int
    pages_transfer: int
    pages_locked: int
    reservations: int
    page_bytes: int
    def __init__(self, pages_total: _Optional[int] = ..., pages_free: _Optional[int] = ..., pages_prefix: _Optional[int] = ..., pages_transfer: _Optional[int] = ..., pages_locked: _Optional[int] = ..., reservations: _Optional[int] = ..., page_bytes: _Optional[int] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("request_id", "num_tokens", "block_hashes", "tokens_digest", "ttl_s", "prefix_only", "holder", "tenant", "sender")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    PREFIX_ONLY_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    num_tokens: int
    block_hashes: bytes
    tokens_digest: bytes
    ttl_s: float
    prefix_only: bool
    holder: str
    tenant: str
    sender: str
    def __init__(self, request_id: _Optional[str] = ..., num_tokens: _Optional[int] = ..., block_hashes: _Optional[bytes] = ..., tokens_digest: _Optional[bytes] = ..., ttl_s: _Optional[float] = ..., prefix_only: _Optional[bool] = ..., holder: _Optional[str] = ..., tenant: _Optional[str] = ..., sender: _Optional[str] = ...) -> None: ...

class ReaddressRequest(_message.Message):
    __slots__ = ("transfer_id", "sender")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    sender: str
    def __init__(self, transfer_id: _Optional[str] = ..., sender: _Optional[str] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("transfer_id", "secret", "num_tokens", "have_tokens", "tokens_digest", "endpoints", "ttl_s", "layout_fingerprint", "node_id", "cluster", "others")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HAVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    secret: bytes
    num_tokens: int
    have_tokens: int
    tokens_digest: bytes
    endpoints: _containers.RepeatedCompositeFieldContainer[Endpoint]
    ttl_s: float
    layout_fingerprint: str
    node_id: str
    cluster: str
    others: Bookings
    def __init__(self, transfer_id: _Optional[str] = ..., secret: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., have_tokens: _Optional[int] = ..., tokens_digest: _Optional[bytes] = ..., endpoints: _Optional[_Iterable[_Union[Endpoint, _Mapping]]] = ..., ttl_s: _Optional[float] = ..., layout_fingerprint: _Optional[str] = ..., node_id: _Optional[str] = ..., cluster: _Optional[str] = ..., others: _Optional[_Union[Bookings, _Mapping]] = ...) -> None: ...

class Bookings(_message.Message):
    __slots__ = ("requests", "clock_s")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_S_FIELD_NUMBER: _ClassVar[int]
    requests: int
    clock_s: float
    def __init__(self, requests: _Optional[int] = ..., clock_s: _Optional[float] = ...) -> None: ...

class Endpoint(_message.Message):
    __slots__ = ("kind", "address", "host_id")
    KIND_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    kind: str
    address: str
    host_id: str
    def __init__(self, kind: _Optional[str] = ..., address: _Optional[str] = ..., host_id: _Optional[str] = ...) -> None: ...

class TransferRef(_message.Message):
    __slots__ = ("transfer_id",)
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    def __init__(self, transfer_id: _Optional[str] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("transfer_id", "reason")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    reason: str
    def __init__(self, transfer_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("ok", "reason")
    OK_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    reason: str
    def __init__(self, ok: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class Call(_message.Message):
    __slots__ = ("id", "timeout_s", "reserve", "abort", "introduce")
    ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    INTRODUCE_FIELD_NUMBER: _ClassVar[int]
    id: int
    timeout_s: float
    reserve: ReserveRequest
    abort: AbortRequest
    introduce: Introduce
    def __init__(self, id: _Optional[int] = ..., timeout_s: _Optional[float] = ..., reserve: _Optional[_Union[ReserveRequest, _Mapping]] = ..., abort: _Optional[_Union[AbortRequest, _Mapping]] = ..., introduce: _Optional[_Union[Introduce, _Mapping]] = ...) -> None: ...

class Introduce(_message.Message):
    __slots__ = ("holder",)
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    holder: str
    def __init__(self, holder: _Optional[str] = ...) -> None: ...

class CallAnswer(_message.Message):
    __slots__ = ("id", "ticket", "done", "refusal")
    ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    id: int
    ticket: Ticket
    done: Done
    refusal: Refusal
    def __init__(self, id: _Optional[int] = ..., ticket: _Optional[_Union[Ticket, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("reason", "detail")
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    reason: str
    detail: str
    def __init__(self, reason: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("request_id", "block_hashes", "ticket")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    block_hashes: bytes
    ticket: Ticket
    def __init__(self, request_id: _Optional[str] = ..., block_hashes: _Optional[bytes] = ..., ticket: _Optional[_Union[Ticket, _Mapping]] = ...) -> None: ...

class LoadResult(_message.Message):
    __slots__ = ("num_tokens", "bytes_sent")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    bytes_sent: int
    def __init__(self, num_tokens: _Optional[int] = ..., bytes_sent: _Optional[int] = ...) -> None: ...

class EgressShare(_message.Message):
    __slots__ = ("holder", "cluster", "bytes_per_s", "own_bytes_per_s", "lease_s", "until_clock_s", "serial")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    OWN_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    UNTIL_CLOCK_S_FIELD_NUMBER: _ClassVar[int]
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    holder: str
    cluster: str
    bytes_per_s: float
    own_bytes_per_s: float
    lease_s: float
    until_clock_s: float
    serial: int
    def __init__(self, holder: _Optional[str] = ..., cluster: _Optional[str] = ..., bytes_per_s: _Optional[float] = ..., own_bytes_per_s: _Optional[float] = ..., lease_s: _Optional[float] = ..., until_clock_s: _Optional[float] = ..., serial: _Optional[int] = ...) -> None: ...

class DropPrefixRequest(_message.Message):
    __slots__ = ("block_hashes", "keep_tokens", "unused_s")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    KEEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNUSED_S_FIELD_NUMBER: _ClassVar[int]
    block_hashes: bytes
    keep_tokens: int
    unused_s: float
    def __init__(self, block_hashes: _Optional[bytes] = ..., keep_tokens: _Optional[int] = ..., unused_s: _Optional[float] = ...) -> None: ...

class DropPrefixResult(_message.Message):
    __slots__ = ("pages",)
    PAGES_FIELD_NUMBER: _ClassVar[int]
    pages: int
    def __init__(self, pages: _Optional[int] = ...) -> None: ...

class ContextRequest(_message.Message):
    __slots__ = ("context_id", "block_hashes", "num_tokens", "ttl_s", "owner", "budget_tokens")
    CONTEXT_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    BUDGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    context_id: str
    block_hashes: bytes
    num_tokens: int
    ttl_s: float
    owner: str
    budget_tokens: int
    def __init__(self, context_id: _Optional[str] = ..., block_hashes: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., ttl_s: _Optional[float] = ..., owner: _Optional[str] = ..., budget_tokens: _Optional[int] = ...) -> None: ...

class Context(_message.Message):
    __slots__ = ("context_id", "num_tokens", "ttl_s", "owner", "whole_ttl_s", "added_tokens", "owned_tokens", "ended")
    CONTEXT_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    WHOLE_TTL_S_FIELD_NUMBER: _ClassVar[int]
    ADDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OWNED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    context_id: str
    num_tokens: int
    ttl_s: float
    owner: str
    whole_ttl_s: float
    added_tokens: int
    owned_tokens: int
    ended: bool
    def __init__(self, context_id: _Optional[str] = ..., num_tokens: _Optional[int] = ..., ttl_s: _Optional[float] = ..., owner: _Optional[str] = ..., whole_ttl_s: _Optional[float] = ..., added_tokens: _Optional[int] = ..., owned_tokens: _Optional[int] = ..., ended: _Optional[bool] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("load_interval_s", "holder", "near", "takes_several")
    LOAD_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    NEAR_FIELD_NUMBER: _ClassVar[int]
    TAKES_SEVERAL_FIELD_NUMBER: _ClassVar[int]
    load_interval_s: float
    holder: str
    near: _containers.RepeatedScalarFieldContainer[str]
    takes_several: bool
    def __init__(self, load_interval_s: _Optional[float] = ..., holder: _Optional[str] = ..., near: _Optional[_Iterable[str]] = ..., takes_several: _Optional[bool] = ...) -> None: ...

class NodeEvent(_message.Message):
    __slots__ = ("seq", "snapshot", "stored", "removed", "description", "load", "cleared", "context", "digest", "several")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SEVERAL_FIELD_NUMBER: _ClassVar[int]
    seq: int
    snapshot: CacheSnapshot
    stored: BlocksStored
    removed: BlocksRemoved
    description: NodeDescription
    load: Load
    cleared: CacheCleared
    context: Context
    digest: CacheDigest
    several: NodeEvents
    def __init__(self, seq: _Optional[int] = ..., snapshot: _Optional[_Union[CacheSnapshot, _Mapping]] = ..., stored: _Optional[_Union[BlocksStored, _Mapping]] = ..., removed: _Optional[_Union[BlocksRemoved, _Mapping]] = ..., description: _Optional[_Union[NodeDescription, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., cleared: _Optional[_Union[CacheCleared, _Mapping]] = ..., context: _Optional[_Union[Context, _Mapping]] = ..., digest: _Optional[_Union[CacheDigest, _Mapping]] = ..., several: _Optional[_Union[NodeEvents, _Mapping]] = ...) -> None: ...

class NodeEvents(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[NodeEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[NodeEvent, _Mapping]]] = ...) -> None: ...

class CacheDigest(_message.Message):
    __slots__ = ("anew", "parts")
    ANEW_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    anew: bool
    parts: _containers.RepeatedCompositeFieldContainer[DigestPart]
    def __init__(self, anew: _Optional[bool] = ..., parts: _Optional[_Iterable[_Union[DigestPart, _Mapping]]] = ...) -> None: ...

class DigestPart(_message.Message):
    __slots__ = ("group", "medium", "added", "removed")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    group: int
    medium: Medium
    added: bytes
    removed: bytes
    def __init__(self, group: _Optional[int] = ..., medium: _Optional[_Union[Medium, str]] = ..., added: _Optional[bytes] = ..., removed: _Optional[bytes] = ...) -> None: ...

class BlocksStored(_message.Message):
    __slots__ = ("group", "hashes", "medium")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    group: int
    hashes: bytes
    medium: Medium
    def __init__(self, group: _Optional[int] = ..., hashes: _Optional[bytes] = ..., medium: _Optional[_Union[Medium, str]] = ...) -> None: ...

class BlocksRemoved(_message.Message):
    __slots__ = ("group", "hashes", "medium")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    group: int
    hashes: bytes
    medium: Medium
    def __init__(self, group: _Optional[int] = ..., hashes: _Optional[bytes] = ..., medium: _Optional[_Union[Medium, str]] = ...) -> None: ...

class CacheSnapshot(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[BlocksStored]
    def __init__(self, groups: _Optional[_Iterable[_Union[BlocksStored, _Mapping]]] = ...) -> None: ...

class CacheCleared(_message.Message):
    __slots__ = ("medium",)
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    medium: Medium
    def __init__(self, medium: _Optional[_Union[Medium, str]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_s", "by")
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    timeout_s: float
    by: str
    def __init__(self, timeout_s: _Optional[float] = ..., by: _Optional[str] = ...) -> None: ...

class UndrainRequest(_message.Message):
    __slots__ = ("by",)
    BY_FIELD_NUMBER: _ClassVar[int]
    by: str
    def __init__(self, by: _Optional[str] = ...) -> None: ...

class ConvertRequest(_message.Message):
    __slots__ = ("epoch", "role", "drain_timeout_s", "verify_timeout_s", "wait_s")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    VERIFY_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    role: str
    drain_timeout_s: float
    verify_timeout_s: float
    wait_s: float
    def __init__(self, epoch: _Optional[int] = ..., role: _Optional[str] = ..., drain_timeout_s: _Optional[float] = ..., verify_timeout_s: _Optional[float] = ..., wait_s: _Optional[float] = ...) -> None: ...

class Conversion(_message.Message):
    __slots__ = ("epoch", "role", "target", "phase", "outcome", "detail", "drain_s", "control_s")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    DRAIN_S_FIELD_NUMBER: _ClassVar[int]
    CONTROL_S_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    role: str
    target: str
    phase: ConversionPhase
    outcome: str
    detail: str
    drain_s: float
    control_s: float
    def __init__(self, epoch: _Optional[int] = ..., role: _Optional[str] = ..., target: _Optional[str] = ..., phase: _Optional[_Union[ConversionPhase, str]] = ..., outcome: _Optional[str] = ..., detail: _Optional[str] = ..., drain_s: _Optional[float] = ..., control_s: _Optional[float] = ...) -> None: ...

"""A double of etcd: keys with revisions, leases on a clock that tests move, watches, compaction, users with passwords.

What clients see of it is checked against real ones: `tests/membership/etcd/test_contract.py`.
"""

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc

from transport.control.proto import etcd_pb2 as pb

PROGRESS_WATCH = -1


@dataclass
class State:
    """What a restart keeps."""

    cluster: int = 1
    revision: int = 1
    compacted: int = 0
    keys: dict[bytes, pb.EtcdKeyValue] = field(default_factory=dict)
    history: list[pb.WatchEvent] = field(default_factory=list)
    leases: dict[int, tuple[int, float]] = field(default_factory=dict)  # seconds, and when they end
    next_lease: int = 1
    passwords: dict[str, str] = field(default_factory=dict)  # users, if calls need one


@dataclass(eq=False)
class Watcher:
    begin: bytes
    end: bytes
    answers: "queue.SimpleQueue[pb.WatchResponse | None]" = field(default_factory=queue.SimpleQueue)

    def sees(self, key: bytes) -> bool:
        return self.begin <= key < self.end


class EtcdDouble:
    """Serves at 127.0.0.1:`port` from `start` to `stop`, which keeps what is stored, as `kill -9` does."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.state = State()
        self.port = 0
        self.is_silent = False  # it takes calls, and answers none
        self.tokens: set[str] = set()
        self.watches_begun = 0
        self.logins = 0
        self._watchers: set[Watcher] = set()
        self._lock = threading.RLock()
        self._server: Any = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._threads = ThreadPoolExecutor(16)
        self._server = grpc.server(self._threads, options=[("grpc.so_reuseport", 0)])
        unary: dict[str, dict[str, Any]] = {
            "KV": {
                "Range": (pb.RangeRequest, self._range), "Put": (pb.PutRequest, self._put),
                "DeleteRange": (pb.DeleteRangeRequest, self._delete), "Txn": (pb.TxnRequest, self._txn),
            },
            "Lease": {
                "LeaseGrant": (pb.LeaseGrantRequest, self._grant), "LeaseRevoke": (pb.LeaseRevokeRequest, self._revoke),
            },
            "Auth": {"Authenticate": (pb.AuthenticateRequest, self._authenticate)},
        }  # fmt: skip
        streams: dict[str, dict[str, Any]] = {
            "Lease": {"LeaseKeepAlive": (pb.LeaseKeepAliveRequest, self._keep_alive)},
            "Watch": {"Watch": (pb.WatchRequest, self._watch)},
        }
        handlers: dict[str, dict[str, Any]] = {}
        for service, methods in unary.items():
            for name, (request, call) in methods.items():
                handlers.setdefault(service, {})[name] = grpc.unary_unary_rpc_method_handler(
                    self._guarded(call, service), request.FromString, lambda answer: answer.SerializeToString()
                )
        for service, methods in streams.items():
            for name, (request, call) in methods.items():
                handlers.setdefault(service, {})[name] = grpc.stream_stream_rpc_method_handler(
                    call, request.FromString, lambda answer: answer.SerializeToString()
                )
        for service, found in handlers.items():
            handler = grpc.method_handlers_generic_handler(f"etcdserverpb.{service}", found)
            self._server.add_generic_rpc_handlers((handler,))
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()

    def stop(self) -> None:
        for watcher in [*self._watchers]:
            watcher.answers.put(None)
        self._server.stop(0).wait()
        self._threads.shutdown(wait=False)

    def compact(self) -> None:
        with self._lock:
            self.state.compacted = self.state.revision
            self.state.history.clear()

    def tick(self) -> None:
        """Deletes what leases that have ended had kept; every call does so, too."""
        with self._lock:
            for lease in [lease for lease, (_, until) in self.state.leases.items() if self.clock() >= until]:
                self._end_lease(lease)

    def put(self, key: str, value: bytes, lease: int = 0) -> None:
        """As another client would."""
        with self._lock:
            self._store(key.encode(), value, lease)

    def put_all(self, values: Mapping[str, bytes]) -> None:
        for key, value in values.items():
            self.put(key, value)

    def delete(self, *keys: str) -> None:
        """All in one revision."""
        with self._lock:
            self._drop([key.encode() for key in keys])

    def end_watches(self, reason: str) -> None:
        for watcher in [*self._watchers]:
            watcher.answers.put(pb.WatchResponse(header=self._header(), canceled=True, cancel_reason=reason))

    def _guarded(self, call: Callable[[Any, Any], Any], service: str) -> Callable[[Any, Any], Any]:
        def guarded(request: Any, context: Any) -> Any:
            if self.is_silent:
                threading.Event().wait(context.time_remaining() or 10.0)
            with self._lock:
                self.tick()
                if service != "Auth" and self.state.passwords:
                    self._check(context)
                return call(request, context)

        return guarded

    def _check(self, context: Any) -> None:
        token = dict(context.invocation_metadata()).get("token", "")
        if not token:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: user name is empty")
        if token not in self.tokens:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "etcdserver: invalid auth token")

    def _header(self) -> pb.EtcdHeader:
        return pb.EtcdHeader(cluster_id=self.state.cluster, member_id=1, revision=self.state.revision)

    def _authenticate(self, request: pb.AuthenticateRequest, context: Any) -> pb.AuthenticateResponse:
        if not self.state.passwords:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "etcdserver: authentication is not enabled")
        if self.state.passwords.get(request.name) != request.password:
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: authentication failed, invalid user ID or password"
            )
        self.logins += 1
        self.tokens.add(f"token.{self.logins}")
        return pb.AuthenticateResponse(header=self._header(), token=f"token.{self.logins}")

    def _range(self, request: pb.RangeRequest, context: Any) -> pb.RangeResponse:
        if request.revision > self.state.revision:
            context.abort(grpc.StatusCode.OUT_OF_RANGE, "etcdserver: mvcc: required revision is a future revision")
        end = request.range_end or request.key + b"\0"
        found = [self.state.keys[key] for key in sorted(self.state.keys) if request.key <= key < end]
        shown = found[: request.limit] if request.limit else found
        return pb.RangeResponse(header=self._header(), kvs=shown, more=len(shown) < len(found), count=len(found))

    def _put(self, request: pb.PutRequest, context: Any) -> pb.PutResponse:
        if request.lease and request.lease not in self.state.leases:
            context.abort(grpc.StatusCode.NOT_FOUND, "etcdserver: requested lease not found")
        self._store(request.key, request.value, request.lease)
        return pb.PutResponse(header=self._header())

    def _delete(self, request: pb.DeleteRangeRequest, context: Any) -> pb.DeleteRangeResponse:
        end = request.range_end or request.key + b"\0"
        gone = [key for key in self.state.keys if request.key <= key < end]
        self._drop(gone)
        return pb.DeleteRangeResponse(header=self._header(), deleted=len(gone))

    def _txn(self, request: pb.TxnRequest, context: Any) -> pb.TxnResponse:
        holds = all(map(self._holds, request.compare))
        for operation in request.success if holds else request.failure:
            if operation.HasField("request_put"):
                self._put(operation.request_put, context)
            elif operation.HasField("request_delete_range"):
                self._delete(operation.request_delete_range, context)
        return pb.TxnResponse(header=self._header(), succeeded=holds)

    def _holds(self, compare: pb.Compare) -> bool:
        """Of what is compared, only what our clients compare."""
        known = self.state.keys.get(compare.key, pb.EtcdKeyValue())
        if compare.target == pb.Compare.CREATE:
            return known.create_revision == compare.create_revision
        assert compare.target == pb.Compare.MOD
        return known.mod_revision == compare.mod_revision

    def _grant(self, request: pb.LeaseGrantRequest, context: Any) -> pb.LeaseGrantResponse:
        lease, self.state.next_lease = self.state.next_lease, self.state.next_lease + 1
        self.state.leases[lease] = request.TTL, self.clock() + request.TTL
        return pb.LeaseGrantResponse(header=self._header(), ID=lease, TTL=request.TTL)

    def _revoke(self, request: pb.LeaseRevokeRequest, context: Any) -> pb.LeaseRevokeResponse:
        if request.ID not in self.state.leases:
            context.abort(grpc.StatusCode.NOT_FOUND, "etcdserver: requested lease not found")
        self._end_lease(request.ID)
        return pb.LeaseRevokeResponse(header=self._header())

    def _keep_alive(self, requests: Iterator[Any], context: Any) -> Iterator[pb.LeaseKeepAliveResponse]:
        for request in requests:
            with self._lock:
                self.tick()
                ttl_s = self.state.leases.get(request.ID, (0, 0.0))[0]
                if ttl_s:
                    self.state.leases[request.ID] = ttl_s, self.clock() + ttl_s
                yield pb.LeaseKeepAliveResponse(header=self._header(), ID=request.ID, TTL=ttl_s)

    def _watch(self, requests: Iterator[Any], context: Any) -> Iterator[pb.WatchResponse]:
        create = next(requests).create_request
        with self._lock:
            created = pb.WatchResponse(header=self._header(), created=True)
            token = dict(context.invocation_metadata()).get("token", "")
            if self.state.passwords and token not in self.tokens:
                created.canceled, created.cancel_reason = True, "rpc error: code = PermissionDenied desc = denied"
                yield created
                return
            yield created
            if create.start_revision <= self.state.compacted:
                yield pb.WatchResponse(header=self._header(), canceled=True, compact_revision=self.state.compacted)
                return
            watcher = Watcher(create.key, create.range_end)
            self._watchers.add(watcher)
            self.watches_begun += 1
            context.add_callback(lambda: watcher.answers.put(None))
            past = [event for event in self.state.history if event.kv.mod_revision >= create.start_revision]
            self._tell(watcher, past)
        threading.Thread(target=self._hear, args=(watcher, requests), daemon=True).start()
        try:
            while (answer := watcher.answers.get()) is not None:
                yield answer
        finally:
            self._watchers.discard(watcher)

    def _hear(self, watcher: Watcher, requests: Iterator[Any]) -> None:
        """Requests for progress."""
        try:
            for request in requests:
                if request.HasField("progress_request") and not self.is_silent:
                    watcher.answers.put(pb.WatchResponse(header=self._header(), watch_id=PROGRESS_WATCH))
        except Exception:  # the stream has ended
            watcher.answers.put(None)

    def _store(self, key: bytes, value: bytes, lease: int) -> None:
        self.state.revision += 1
        before = self.state.keys.get(key)
        self.state.keys[key] = pb.EtcdKeyValue(
            key=key, value=value, lease=lease, mod_revision=self.state.revision,
            create_revision=before.create_revision if before is not None else self.state.revision,
            version=before.version + 1 if before is not None else 1,
        )  # fmt: skip
        self._happened([pb.WatchEvent(type=pb.WatchEvent.PUT, kv=self.state.keys[key])])

    def _drop(self, keys: list[bytes]) -> None:
        there = [key for key in keys if key in self.state.keys]
        if not there:
            return
        self.state.revision += 1
        for key in there:
            del self.state.keys[key]
        gone = [pb.EtcdKeyValue(key=key, mod_revision=self.state.revision) for key in there]
        self._happened([pb.WatchEvent(type=pb.WatchEvent.DELETE, kv=kv) for kv in gone])

    def _end_lease(self, lease: int) -> None:
        del self.state.leases[lease]
        self._drop([key for key, kv in self.state.keys.items() if kv.lease == lease])

    def _happened(self, events: list[pb.WatchEvent]) -> None:
        self.state.history += events
        for watcher in self._watchers:
            self._tell(watcher, events)

    def _tell(self, watcher: Watcher, events: list[pb.WatchEvent]) -> None:
        seen = [event for event in events if watcher.sees(event.kv.key)]
        if seen:
            watcher.answers.put(pb.WatchResponse(header=self._header(), events=seen))

"""Asks one etcd, at whichever of its endpoints answers: calls with deadlines, tokens renewed, and watches.

Calls block. What goes wrong is said for each endpoint, in the order of the settings. So the words stay the same while one
after the other is tried. An endpoint that fails is left, with its channel: files of certificates are read again for the
next one.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

import grpc

from membership.errors import EtcdFailed
from membership.etcd.settings import EtcdConfig
from membership.etcd.watching import EtcdWatch
from transport.control.credentials import channel_options
from transport.control.proto.etcd_pb2 import (
    AuthenticateRequest,
    AuthenticateResponse,
    LeaseGrantRequest,
    LeaseGrantResponse,
    LeaseKeepAliveRequest,
    LeaseKeepAliveResponse,
    LeaseRevokeRequest,
    LeaseRevokeResponse,
    PutRequest,
    PutResponse,
    RangeRequest,
    RangeResponse,
    TxnRequest,
    TxnResponse,
    WatchRequest,
    WatchResponse,
)
from transport.control.secret_files import read_secret

T = TypeVar("T")
A = TypeVar("A", covariant=True)

CALL_S: Final = 4.0  # for all endpoints together
LEAST_TRY_S: Final = 1.0  # for one of them
MAX_MESSAGE_BYTES: Final = 16 << 20
MAX_DETAIL_CHARS: Final = 160
OLD_TOKEN: Final = ("invalid auth token", "revision of auth store is old")
FULL: Final = "database space exceeded"  # what etcd says of its quota, with the code of a message that is too long
NEEDS_LEADER: Final = ("hasleader", "true")  # a member that is cut off from the others ends the watch
# These say something of the endpoint; others would answer in another way.
OF_ENDPOINT: Final = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.UNIMPLEMENTED,
)
OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel tries at once
)
REASONS: Final[Mapping[grpc.StatusCode, str]] = {
    grpc.StatusCode.PERMISSION_DENIED: "denied",
    grpc.StatusCode.UNAUTHENTICATED: "denied",
    grpc.StatusCode.INVALID_ARGUMENT: "denied",  # so etcd answers a wrong password, and calls without a user
    grpc.StatusCode.FAILED_PRECONDITION: "denied",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "too_long",
}


class _Answer(Protocol[A]):
    """A class of protobuf messages."""

    def FromString(self, data: bytes, /) -> A: ...


class _Session:
    """A channel to one endpoint, and the token to show there."""

    def __init__(self, config: EtcdConfig, target: str, token: str) -> None:
        """Raises OSError."""
        self.target = target
        self.token = token
        options = [*OPTIONS, *channel_options(config.name)]
        if config.is_tls:
            self.channel = grpc.secure_channel(target, _credentials(config), options)
        else:
            self.channel = grpc.insecure_channel(target, options)

    @property
    def metadata(self) -> list[tuple[str, str]]:
        return [("token", self.token)] if self.token else []

    def unary(self, path: str, request: Any, answer: _Answer[A], timeout_s: float) -> A:
        call = self.channel.unary_unary(
            f"/etcdserverpb.{path}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        said: A = call(request, timeout=timeout_s, metadata=self.metadata)
        return said


class EtcdClient:
    """One etcd. Every method raises EtcdFailed."""

    def __init__(self, config: EtcdConfig, clock: Callable[[], float] = time.monotonic, call_s: float = CALL_S) -> None:
        self._config = config
        self._clock = clock
        self._call_s = call_s
        self._at = 0
        self._session: _Session | None = None
        self._token = ""  # the last one: all endpoints know it, and checking a password costs etcd far more
        self._problems: dict[str, str] = {}  # of the last try, by target
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def where(self) -> str:
        """As messages call it."""
        return f"etcd at {', '.join(self._config.targets)}"

    def range(self, key: bytes, end: bytes = b"", *, limit: int = 0, revision: int = 0) -> RangeResponse:
        request = RangeRequest(key=key, range_end=end, limit=limit, revision=revision)
        return self._unary("KV/Range", request, RangeResponse)

    def put(self, key: bytes, value: bytes, lease: int = 0) -> int:
        """The revision of the change."""
        return self._unary("KV/Put", PutRequest(key=key, value=value, lease=lease), PutResponse).header.revision

    def transact(self, request: TxnRequest) -> TxnResponse:
        return self._unary("KV/Txn", request, TxnResponse)

    def grant(self, ttl_s: float) -> int:
        """A new lease."""
        answer = self._unary("Lease/LeaseGrant", LeaseGrantRequest(TTL=round(ttl_s)), LeaseGrantResponse)
        if answer.error:
            raise EtcdFailed("denied", f"{self.where}: it gives no lease: {_short(answer.error)}")
        return answer.ID

    def keep_alive(self, lease: int) -> bool:
        """Whether there still is such a lease, which is as good as new then."""

        def ask(session: _Session, timeout_s: float) -> bool:
            call = session.channel.stream_stream(
                "/etcdserverpb.Lease/LeaseKeepAlive",
                request_serializer=LeaseKeepAliveRequest.SerializeToString,
                response_deserializer=LeaseKeepAliveResponse.FromString,
            )(iter([LeaseKeepAliveRequest(ID=lease)]), timeout=timeout_s, metadata=session.metadata)
            try:
                for answer in call:
                    return bool(answer.TTL > 0)
                return False
            finally:
                call.cancel()

        return self._asked(ask)

    def revoke(self, lease: int) -> None:
        self._unary("Lease/LeaseRevoke", LeaseRevokeRequest(ID=lease), LeaseRevokeResponse)

    def watch(self, key: bytes, end: bytes, revision: int) -> EtcdWatch:
        """What changes from this revision on, at the endpoint that answered last."""

        def call(requests: Iterator[WatchRequest]) -> Any:
            with self._lock:
                session = self._connected()
            return session.channel.stream_stream(
                "/etcdserverpb.Watch/Watch",
                request_serializer=WatchRequest.SerializeToString,
                response_deserializer=WatchResponse.FromString,
            )(requests, metadata=[*session.metadata, NEEDS_LEADER])

        try:
            return EtcdWatch(call, key, end, revision)
        except ValueError as error:
            raise EtcdFailed("unreachable", f"{self.where}: {error}") from error

    def leave_endpoint(self) -> None:
        """The next call goes to the next endpoint, with files as they are then."""
        with self._lock:
            self._leave()

    def close(self) -> None:
        """For good."""
        self._is_closed = True
        session = self._session
        if session is not None:
            session.channel.close()

    def _unary(self, path: str, request: Any, answer: _Answer[A]) -> A:
        return self._asked(lambda session, timeout_s: session.unary(path, request, answer, timeout_s))

    def _asked(self, ask: Callable[[_Session, float], T]) -> T:
        """What the first endpoint that answers says."""
        targets = self._config.targets
        share_s = max(LEAST_TRY_S, self._call_s / len(targets))
        with self._lock:
            until = self._clock() + self._call_s
            for _ in targets:
                left_s = until - self._clock()
                if left_s <= 0.0:
                    break
                try:
                    session = self._connected()
                    answer = self._with_token(session, ask, min(share_s, left_s))
                except grpc.RpcError as error:
                    self._failed(error, targets[self._at], share_s)
                except ValueError as error:  # so gRPC says that the channel was closed meanwhile
                    raise EtcdFailed("unreachable", f"{self.where}: {error}") from error
                else:
                    self._problems.pop(session.target, None)
                    return answer
        said = "; ".join(f"{target}: {self._problems[target]}" for target in targets if target in self._problems)
        raise EtcdFailed("unreachable", f"etcd does not answer: {said}")

    def _failed(self, error: Any, target: str, share_s: float) -> None:
        """Raises EtcdFailed for what another endpoint would say, too."""
        if error.code() not in OF_ENDPOINT:
            reason = "full" if FULL in (error.details() or "") else REASONS.get(error.code(), "refused")
            if reason == "denied":
                self._token = ""
            self._leave()
            raise EtcdFailed(reason, f"{self.where}: {_short(error.details())}") from error
        self._problems[target] = what_failed(error, share_s)
        self._leave()

    def _connected(self) -> _Session:
        if self._is_closed:
            raise EtcdFailed("unreachable", f"{self.where}: no longer asked")
        if self._session is None:
            target = self._config.targets[self._at]
            try:
                self._session = _Session(self._config, target, self._token)
            except (OSError, ValueError) as error:
                raise EtcdFailed("unreadable", f"{self.where}: {error}") from error
        return self._session

    def _leave(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.channel.close()
        self._at = (self._at + 1) % len(self._config.targets)

    def _with_token(self, session: _Session, ask: Callable[[_Session, float], T], timeout_s: float) -> T:
        """Once more with a new token, where etcd knows ours no longer."""
        is_new = self._log_in(session, timeout_s)
        try:
            return ask(session, timeout_s)
        except grpc.RpcError as error:
            if is_new or not session.token or not any(words in (error.details() or "") for words in OLD_TOKEN):
                raise
        session.token = ""
        self._log_in(session, timeout_s)
        return ask(session, timeout_s)

    def _log_in(self, session: _Session, timeout_s: float) -> bool:
        """Whether there is a token that was not there before."""
        if not self._config.user or session.token:
            return False
        request = AuthenticateRequest(name=self._config.user, password=self._password())
        session.token = self._token = session.unary("Auth/Authenticate", request, AuthenticateResponse, timeout_s).token
        return True

    def _password(self) -> str:
        assert self._config.password_file is not None
        try:
            return read_secret(self._config.password_file)
        except (OSError, UnicodeDecodeError) as error:
            raise EtcdFailed("unreadable", f"password_file {self._config.password_file}: {error}") from error


def _credentials(config: EtcdConfig) -> grpc.ChannelCredentials:
    def read(path: Any) -> bytes | None:
        return path.read_bytes() if path is not None else None

    return grpc.ssl_channel_credentials(read(config.authority), read(config.key), read(config.certificate))


SAID: Final[Sequence[tuple[str, str]]] = (
    ("refused", "connection refused"),
    ("WRONG_VERSION_NUMBER", "it does not speak TLS"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not of the authority"),
    ("not valid for", "its certificate has another name"),
    ("Hostname Verification", "its certificate has another name"),
    ("DNS resolution failed", "no such host"),
)


def what_failed(error: Any, timeout_s: float) -> str:
    """In words that stay the same while the failure does."""
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"no answer within {timeout_s:.2g} s"
    details = error.details() or error.code().name.lower()
    return next((words for part, words in SAID if part in details), _short(details))


def _short(text: str | None) -> str:
    """A peer's words, not at any length."""
    text = (text or "no reason given").removeprefix("etcdserver: ")
    printable = "".join(letter if letter.isprintable() else " " for letter in text[:MAX_DETAIL_CHARS])
    return printable if len(text) <= MAX_DETAIL_CHARS else f"{printable}..."

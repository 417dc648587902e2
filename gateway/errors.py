"""What can go wrong in the gateway.

GatewayError
├── GatewayConfigError        the configuration file is wrong; the process does not start
│   └── CannotListen          a port that it names is not to be had
├── NotReplaced               a gateway cannot replace another one; the error says whether that one goes on
├── WorkersFail               processes of the gateway end as often as they are started
├── ExchangeError             a proxy has told an endpoint picker what cannot come now; the stream ends
├── ApiError                  becomes the client's answer, in OpenAI's shape
│   ├── BadRequest            400: the client's own mistake, `param` names the field
│   ├── Unauthorised          401: no key, or an unknown one
│   ├── Forbidden             403: an operator whose role may not do that
│   ├── Overloaded            429: too many requests in flight, or too much from one address
│   │   └── TenantLimited     more than this tenant may ask for
│   ├── Unavailable           503: nothing can serve this now, `retry_after_s` says when to ask again
│   │   ├── NoDecodeNode      no decode node takes requests at the moment
│   │   ├── NoPrefillNode     decode nodes need one, and none reaches them
│   │   ├── NoModel           no node has said yet that it has the model
│   │   └── ShapeKillsEngines engines died under requests of this kind
│   ├── ReaderDied            500: the process that read the body did not survive it
│   ├── KillsEngines          500: neither did two engines
│   └── InternalError         500: an error of ours
├── LegFailed                 HTTP with an engine; `gateway.upstream.legs` says which node's leg it was
└── NodeFailure               a node did not do what was asked; `planner.decisions.failures.retries` says what follows
    ├── AgentCallFailed       its agent, over gRPC
    ├── PrefillFailed         its engine, over HTTP
    └── DecodeFailed
"""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from planner.decisions.failures.retries import FailureKind, failure_of

LATE_S: Final = 0.5  # that a timer is: this process was stopped, or stuck
RETRY_AFTER_S: Final = 1.0


class GatewayError(Exception):
    """Base of all errors of this package."""


class GatewayConfigError(GatewayError):
    """Names the key, the value and what is allowed."""


class CannotListen(GatewayConfigError):
    """Names the address, and why not."""


class NotReplaced(GatewayError):
    """Says why not; and `goes_on` whether the other one does."""

    def __init__(self, why: str, *, goes_on: bool = True) -> None:
        super().__init__(why)
        self.goes_on = goes_on


class WorkersFail(GatewayError):
    """A worker does not stay up, however often it is started; `status` is what it ended with."""

    def __init__(self, number: int, status: int, deaths: int) -> None:
        super().__init__(f"worker {number} ended {deaths} times, at last with status {status}: given up")
        self.status = status


class ExchangeError(GatewayError):
    """Names the message, and the state of the exchange."""


class ApiError(GatewayError):
    """An answer to the client: `{"error": {"message", "type", "param", "code"}}` with an HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        is_final: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.is_final = is_final  # the client is told not to try again, whatever the status
        self.headers: Mapping[str, str] = {}  # of the answer, beside those that follow from the rest

    def body(self) -> bytes:
        """The JSON body of the answer."""
        return msgspec.json.encode(
            {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}
        )


SHOWN_CHARS: Final = 256  # of a name that a client has made up


def unknown_model(name: str, served: str = "") -> "ApiError":
    """404 for a model that is not served, or not to this client. `served` is the one that is, if there is no other."""
    more = f"this gateway serves '{served}'." if served else "GET /v1/models lists those that you may use."
    return ApiError(
        404, f"The model '{name[:SHOWN_CHARS]}' does not exist; {more}", param="model", code="model_not_found"
    )


def no_model_named() -> "ApiError":
    """404 for a body that names no model, or cannot be read, from a client that may not use the default one."""
    message = (
        "The body names no model, and the default one is not for you; GET /v1/models lists those that you may use."
    )
    return ApiError(404, message, param="model", code="model_not_found")


class BadRequest(ApiError):
    """The request can never work as it is."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(400, message, param=param, code=code)


class Unauthorised(ApiError):
    """The client must show a key, as WWW-Authenticate says (RFC 9110): never Basic, which browsers keep for ever."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(401, message, code=code)


class Forbidden(ApiError):
    """The caller is known, and lacks the right."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(403, message, type="permission_error", code=code)


class Overloaded(ApiError):
    """More is under way than this gateway accepts, in all or from one address."""

    def __init__(
        self, message: str, code: str = "rate_limit_exceeded", *, retry_after_s: float = RETRY_AFTER_S
    ) -> None:
        super().__init__(429, message, type="rate_limit_error", code=code, retry_after_s=retry_after_s)


class TenantLimited(Overloaded):
    """A tenant's own limit, however much room there is. `headers` say what is left of each."""

    def __init__(self, message: str, code: str, retry_after_s: float, headers: Mapping[str, str]) -> None:
        super().__init__(message, code, retry_after_s=retry_after_s)
        self.headers = headers


class Unavailable(ApiError):
    """No node can serve the request at the moment. `code` is also the reason label that is counted."""

    def __init__(self, message: str, code: str, *, retry_after_s: float = RETRY_AFTER_S) -> None:
        super().__init__(503, message, type="server_error", code=code, retry_after_s=retry_after_s)


class NoDecodeNode(Unavailable):
    """No decode node of a model takes requests at the moment."""

    def __init__(self, model: str) -> None:
        super().__init__(f"The model '{model}' has no decode node ready.", "no_decode_node")


class NoPrefillNode(Unavailable):
    """Decode nodes that compute no prompts are ready, and no prefill node of the model is that reaches one of them."""

    def __init__(self, model: str) -> None:
        message = f"The model '{model}' has no prefill node ready, and its decode nodes compute no prompts."
        super().__init__(message, "no_prefill_node")


class NoModel(Unavailable):
    """No node has said yet that it has the model, or the gateway is not done with loading what it takes to serve it."""

    def __init__(self, model: str = "") -> None:
        named = f" the model '{model}'" if model else " its model"
        super().__init__(f"No node has reported{named} yet.", "no_model")


class ShapeKillsEngines(Unavailable):
    """Engines died under a request with these options, one after the other: for a while no other such request is tried."""

    def __init__(self, shape: str, retry_after_s: float) -> None:
        message = f"Engines died under a request of this kind ({shape}); such requests are not tried for a while."
        super().__init__(message, "shape_kills_engines", retry_after_s=retry_after_s)


class ReaderDied(ApiError):
    """The process that read this body ended, or took too long: what did that to one would do it to the next."""

    def __init__(self) -> None:
        super().__init__(500, "The body could not be read.", type="server_error", code="reader_died", is_final=True)


class KillsEngines(ApiError):
    """Engines died under this request one after the other. No one may carry it to a third."""

    def __init__(self, nodes: Sequence[str]) -> None:
        message = f"{len(nodes)} engines died while they worked on this request; it is not tried again."
        super().__init__(500, message, type="server_error", code="kills_engines", is_final=True)


class InternalError(ApiError):
    """An error of the gateway's own, which has been logged and counted."""

    def __init__(self) -> None:
        super().__init__(500, "Internal error.", type="server_error", code="internal_error")


class LegFailed(GatewayError):
    """An exchange with an engine did not come to its end: "unreachable", "connection_lost" or "timeout"."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail)
        self.reason = reason


class NodeFailure(GatewayError):
    """A node did not do what was asked. `reason` is a metric label, `failure` what the retry table knows it as."""

    def __init__(self, node: str, reason: str, detail: str = "", failure: FailureKind | None = None) -> None:
        super().__init__(f"{node}: {reason}{': ' + detail if detail else ''}")
        self.node = node
        self.reason = reason
        self.detail = detail
        self.failure = failure or failure_of(reason)


class AgentCallFailed(NodeFailure):
    """A gRPC call to an agent failed."""


def unheard(address: str, silence_s: float, late_s: float) -> AgentCallFailed:
    """What it means that nothing was heard of a node for `silence_s`, if that was noticed `late_s` after."""
    if late_s >= LATE_S:
        return AgentCallFailed(
            address, "not_listened", f"we were not there for {late_s:.1f} s or more, it may have said something"
        )
    return AgentCallFailed(address, "silent", f"no event for {silence_s} s")


class PrefillFailed(NodeFailure):
    """The KVCache of a prompt was not delivered."""


class DecodeFailed(NodeFailure):
    """The decode node gave no token, or no more of them."""

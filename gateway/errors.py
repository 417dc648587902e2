"""What can go wrong in the gateway.

GatewayError
├── ConfigError               the configuration file is wrong; the process does not start
│   └── CannotListen          a port that it names is not to be had
├── ApiError                  becomes the client's answer, in OpenAI's shape
│   ├── BadRequest            400: the client's own mistake, `param` names the field
│   ├── Overloaded            429: too many requests in flight
│   └── Unavailable           503: nothing can serve this now, `retry_after_s` says when to ask again
├── NodeError                 an agent did not do what was asked over gRPC, `reason` is a metric label
└── LegFailed                 an engine did not do what was asked over HTTP, `reason` is a metric label
    ├── PrefillFailed
    └── DecodeFailed
"""

from typing import Final

import msgspec

RETRY_AFTER_S: Final = 1.0


class GatewayError(Exception):
    """Base of all errors of this package."""


class ConfigError(GatewayError):
    """Names the key, the value and what is allowed."""


class CannotListen(ConfigError):
    """Names the address, and why not."""


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
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """The JSON body of the answer."""
        return msgspec.json.encode(
            {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}
        )


class BadRequest(ApiError):
    """The request can never work as it is."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(400, message, param=param, code=code)


class Overloaded(ApiError):
    """More requests are in flight than this gateway accepts."""

    def __init__(self, limit: int) -> None:
        message = f"The gateway already serves {limit} requests, its limit. Please retry."
        super().__init__(429, message, type="rate_limit_error", code="rate_limit_exceeded", retry_after_s=RETRY_AFTER_S)


class Unavailable(ApiError):
    """No node can serve the request at the moment. `code` is also the reason label that is counted."""

    def __init__(self, message: str, code: str, *, retry_after_s: float = RETRY_AFTER_S) -> None:
        super().__init__(503, message, type="server_error", code=code, retry_after_s=retry_after_s)


class NodeError(GatewayError):
    """A gRPC call to an agent failed."""

    def __init__(self, node: str, reason: str, detail: str = "") -> None:
        super().__init__(f"{node}: {reason}{': ' + detail if detail else ''}")
        self.node = node
        self.reason = reason

    @property
    def blames_node(self) -> bool:
        """Whether the node is likely to fail the next request as well, until it says otherwise."""
        return self.reason in ("unreachable", "timeout")


class LegFailed(GatewayError):
    """An HTTP leg failed before it gave a usable answer."""

    def __init__(self, node: str, reason: str, detail: str = "") -> None:
        super().__init__(f"{node}: {reason}{': ' + detail if detail else ''}")
        self.node = node
        self.reason = reason

    @property
    def blames_node(self) -> bool:
        """Whether the node is likely to fail the next request as well; a full or refusing node is not."""
        return self.reason in ("unreachable", "connection_lost")


class PrefillFailed(LegFailed):
    """The KVCache of a prompt was not delivered. `retryable`: another node may succeed where this one did not."""

    def __init__(self, node: str, reason: str, detail: str = "", *, retryable: bool = True) -> None:
        super().__init__(node, reason, detail)
        self.retryable = retryable


class DecodeFailed(LegFailed):
    """The decode node gave no token."""

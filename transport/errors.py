"""Errors of a link.

TransportError
├── ProtocolError
│   ├── LocalProtocolError     the caller asked for something the state does not allow
│   └── RemoteProtocolError    the peer sent something it must not send
│       └── GreetingRefused    the peer's greeting is not one that we answer
├── ConnectionRefused          the peer answered the handshake with a reason
├── TargetFailed               the memory of a landing is not there
├── PeerLost                   no connection, or a silent one, past its deadline
├── BackendMissing             an optional package that was asked for is not installed
└── Closed                     the client or server was closed

The outcome of a transfer is a value (`PushResult`, `LandingResult`), not an exception: it arrives in a callback.
"""


class TransportError(Exception):
    """Base of everything this package raises."""


class ProtocolError(TransportError):
    """One end broke the protocol."""


class LocalProtocolError(ProtocolError):
    """Our caller did: the present state does not allow what it asked for."""


class RemoteProtocolError(ProtocolError):
    """The peer did. The connection must end; its transfers continue over another one.

    `code`, one of `frames.Code`, is what the peer is told and what is counted.
    """

    def __init__(self, detail: str, code: str = "protocol") -> None:
        super().__init__(detail)
        self.code = code


class GreetingRefused(RemoteProtocolError):
    """We turned the peer away and told it why."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}", code)
        self.detail = detail


class ConnectionRefused(TransportError):
    """The peer said goodbye; `code` is one of `frames.Code`."""

    def __init__(self, code: str, detail: str = "") -> None:
        super().__init__(f"{code}: {detail}" if detail else code)
        self.code = code
        self.detail = detail


class TargetFailed(TransportError):
    """The owner of a landing did not say where its bytes belong; the cause is what it raised."""


class PeerLost(TransportError):
    """The connection broke or stayed silent for too long."""


class BackendMissing(TransportError):
    """A requested feature comes with an extra that is not installed, or does not load."""

    def __init__(self, what: str, extra: str, cause: ImportError) -> None:
        super().__init__(f'{what} needs the {extra} extra (pip install "prfaas[{extra}]"): {cause}')
        self.extra = extra


class Closed(TransportError):
    """Used after close()."""

"""Errors of the engine.

EngineError
├── ModelError            a model directory cannot be built, read or run
├── RequestError          the client is told: HTTP status, OpenAI error code, offending parameter
├── TransferError         KVCache that should have arrived or left did not; carries a reason label
│   └── AgentGone         the connection to the node's agent broke
├── PagesInvalid          pages of a job do not fit the layout
├── PrefillAborted        a computation was told to stop; it is not awaited
└── StageDied             a process that the engine computes with is gone, or hangs
"""


class EngineError(Exception):
    """Base of all errors of this package."""


class ModelError(EngineError):
    """A model directory cannot be built, read or run."""


class RequestError(EngineError):
    """An error for the client, in the shape of OpenAI's errors."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.code = code
        self.param = param


class TransferError(EngineError):
    """KVCache that should have arrived or left did not."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class AgentGone(TransferError):
    """The connection to the node's agent broke while a job needed it."""

    def __init__(self, detail: str = "") -> None:
        super().__init__("agent_gone", detail)


class PagesInvalid(EngineError):
    """Pages of a job do not fit the layout they were allocated for."""


class PrefillAborted(EngineError):
    """A computation was told to stop; its result is not awaited."""


class StageDied(EngineError):
    """A process of the engine is gone, or hangs: the engine cannot compute any more."""

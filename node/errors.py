"""Errors of a node.

NodeError
├── NodeConfigError       the configuration names an unknown key or holds a bad value
├── PortHeld              a process of this node's earlier start does not let go of a port
├── NoArenaMemory         the host's shared memory has no room for the arena
├── EngineFailure
│   ├── EngineRefused      no start of the engine can succeed
│   ├── ArenaError         no page arena can be made for the engine's model
│   ├── LayoutMismatch     an engine came back with another KVCache layout than the arena was cut for
│   └── SecondEngine       an engine says Hello while another engine is connected
├── UnansweredCall        another node, or the engine, was asked over HTTP and gave no answer; `label` says why
├── BadPickedRequest      a picked request that no engine is asked; has a status and OpenAI's `code` and `param`
└── NodeRefusal            a request the node will not serve; `label` is what fallbacks are counted under
"""


class NodeError(Exception):
    """Base of all errors of this package."""


class NodeConfigError(NodeError):
    """An unknown key or an impossible value: names both, and what is allowed."""


class PortHeld(NodeError):
    """A port is taken by what is left of this node's earlier start."""


class NoArenaMemory(NodeError):
    """The memory that `cache_bytes` promises is not there: says how much is. `is_final`: there never will be so much."""

    def __init__(self, message: str, *, is_final: bool) -> None:
        super().__init__(message)
        self.is_final = is_final


class EngineFailure(NodeError):
    """The engine side of the node failed."""


class EngineRefused(EngineFailure):
    """What is configured cannot be served, however often it is tried: says why."""


class ArenaError(EngineFailure):
    """No arena can be made: the layout is invalid, or the memory is not there."""


class LayoutMismatch(EngineFailure):
    """The arena was cut for another model."""


class SecondEngine(EngineFailure):
    """A node has one engine at a time."""


class NodeRefusal(NodeError):
    """The node says no, with a label that callers count under."""

    def __init__(self, label: str, detail: str = "") -> None:
        super().__init__(f"{label}: {detail}" if detail else label)
        self.label = label
        self.detail = detail


class UnansweredCall(NodeError):
    """An engine or another node did not answer, or not so that it can be used."""

    def __init__(self, label: str, detail: str = "") -> None:
        super().__init__(f"{label}: {detail}" if detail else label)
        self.label = label


class BadPickedRequest(NodeError):
    """What a picked request says cannot be asked for; its client is told in OpenAI's shape."""

    def __init__(self, message: str, *, code: str, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.param = param

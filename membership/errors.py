"""Errors of this package.

MembershipError        printed without a traceback
├── SourceFailed       a registry cannot be read now, or what it says cannot be used
│   ├── EtcdFailed     etcd does not answer, or refuses
│   └── KubernetesFailed
│                      the API server does not answer, or refuses
└── EditRefused        a change of a file of members makes no sense, or the file cannot be written
"""


class MembershipError(Exception):
    """Base of all errors of this package."""


class SourceFailed(MembershipError):
    """Says why, in words; `reason` is a label."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class EtcdFailed(SourceFailed):
    """Says which endpoints, and why."""


class KubernetesFailed(SourceFailed):
    """Says which API server, and what it was asked for. `again_s` is how long it wants to be left alone."""

    def __init__(self, reason: str, text: str, again_s: float = 0.0) -> None:
        super().__init__(reason, text)
        self.again_s = again_s


class EditRefused(MembershipError):
    """Names the node, or the file, and what speaks against it."""

"""Errors of this room.

FleetFailed    what other gateways have written cannot be read, or the registry cannot be asked now
"""


class FleetFailed(Exception):
    """Says why, in words; `reason` is a label."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason

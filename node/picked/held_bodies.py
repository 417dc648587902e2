"""Bodies of requests in hand, within bounds for each and for all of them."""

from typing import Final

from node.errors import BadPickedRequest

MAX_BODY_BYTES: Final = 32 << 20
MAX_HELD_BYTES: Final = 2 << 30  # of those that no engine has yet


class HeldBodies:
    """All of them."""

    def __init__(self, max_bytes: int = MAX_HELD_BYTES) -> None:
        self.num_bytes = 0
        self.max_bytes = max_bytes


class HeldBody:
    """One of them, until it is let go."""

    def __init__(self, held: HeldBodies) -> None:
        self._held = held
        self._said = bytearray()
        self._num_bytes = 0

    def add(self, chunk: bytes) -> None:
        """Raises BadPickedRequest for more than there is room for."""
        self._said += chunk
        self._num_bytes += len(chunk)
        self._held.num_bytes += len(chunk)
        if self._num_bytes > MAX_BODY_BYTES:
            what = f"the body has more than {MAX_BODY_BYTES} bytes"
            raise BadPickedRequest(what, code="request_too_large", status=413)
        if self._held.num_bytes > self._held.max_bytes:
            raise BadPickedRequest("too many long bodies are held", code="overloaded", status=503)

    def whole(self) -> bytes:
        """All that has come, once: what counts as held is not kept twice."""
        whole, self._said = bytes(self._said), bytearray()
        return whole

    def let_go(self) -> None:
        """It counts no more."""
        self._held.num_bytes -= self._num_bytes
        self._num_bytes = 0
        self._said = bytearray()

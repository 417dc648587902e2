"""The pure account of a listener's buffer bytes; it knows nothing of waiting threads."""

from collections import Counter


class LentMemory:
    """At most `total_bytes` are lent, and at most `of_one_bytes` of them to one peer."""

    def __init__(self, total_bytes: int, of_one_bytes: int) -> None:
        if not 0 < of_one_bytes <= total_bytes:
            raise ValueError(f"of_one_bytes {of_one_bytes}: 1 to total_bytes, which is {total_bytes}")
        self.total_bytes = total_bytes
        self.of_one_bytes = of_one_bytes
        self.lent_bytes = 0
        self._of: Counter[str] = Counter()

    def lend(self, peer: str, num_bytes: int, spare_bytes: int = 0) -> bool:
        """False when that much is not free now; more than one peer may have is never granted. So many bytes stay free of
        all, and their share of what this peer may have.
        """
        of_all = self.total_bytes - spare_bytes
        of_one = self.of_one_bytes * of_all // self.total_bytes
        if self.lent_bytes + num_bytes > of_all or self._of[peer] + num_bytes > of_one:
            return False
        self.lent_bytes += num_bytes
        self._of[peer] += num_bytes
        return True

    def is_tight(self, peer: str) -> bool:
        """Whether more than half of it, or of what this peer may have, is lent."""
        return 2 * self.lent_bytes > self.total_bytes or 2 * self._of[peer] > self.of_one_bytes

    def give_back(self, peer: str, num_bytes: int) -> None:
        """Gives back bytes that were lent to that peer."""
        self.lent_bytes -= num_bytes
        self._of[peer] -= num_bytes
        assert self.lent_bytes >= 0
        assert self._of[peer] >= 0
        if not self._of[peer]:
            del self._of[peer]

"""The pages of one arena: which are free, which are handed out."""

from collections.abc import Sequence

from hybrid_cache.errors import OutOfPages


class PagePool:
    """Hands out page ids in batches. A page has one holder at a time; the cache knows which."""

    def __init__(self, num_pages: int) -> None:
        if num_pages <= 0:
            raise ValueError(f"num_pages must be positive, not {num_pages}")
        self.num_pages = num_pages
        # A stack, lowest page on top: fresh blocks get neighbouring pages, and copies get long.
        self._free = list(range(num_pages - 1, -1, -1))

    def __repr__(self) -> str:
        return f"PagePool({self.num_free} of {self.num_pages} free)"

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` pages, or OutOfPages and nothing."""
        if count > len(self._free):
            raise OutOfPages(count, len(self._free))
        if count == 0:
            return []
        pages = self._free[-count:]
        del self._free[-count:]
        pages.reverse()
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Takes pages back. The caller held them; a check of the cache finds out if not."""
        self._free += pages[::-1]

    def free_pages(self) -> list[int]:
        """Those that nothing holds, as of now."""
        return self._free.copy()

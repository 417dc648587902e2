"""What is to be done with the KVCache of a prompt when it has been computed, as values."""

from typing import Any, Final, Literal

import msgspec

MARK: Final = "prompt_cache_breakpoint"
CONTROL: Final = "cache_control"
OPTIONS: Final = "prompt_cache_options"
KEY: Final = "prompt_cache_key"
TTL_S: Final = {"5m": 300.0, "30m": 1800.0, "1h": 3600.0}
DEFAULT_TTL: Final = "30m"  # OpenAI's
MAX_MARKS: Final = 4
MAX_KEY_CHARS: Final = 512

Ttl = Literal["5m", "30m", "1h"]


class CacheControl(msgspec.Struct, frozen=True):
    """Anthropic's mark: the prompt up to and including what bears this is kept for a time."""

    type: Literal["ephemeral"]
    ttl: Ttl = "5m"


class Breakpoint(msgspec.Struct, frozen=True):
    """A prefix of a prompt that is to be kept: its length in tokens. `asked_tokens` had the marked part by itself."""

    field: str
    ttl: str
    tokens: int
    asked_tokens: int


class Caching(msgspec.Struct, frozen=True):
    """What is to be done with the KVCache of a prompt when it has been computed."""

    breakpoints: tuple[Breakpoint, ...] = ()
    category: str = ""
    is_explicit: bool = False

    def hints(self, block_size: int) -> dict[str, Any]:
        """The same for engines, as `kv_transfer_params`: where states are kept, what kind of prompt this is."""
        lengths = sorted({each.tokens // block_size * block_size for each in self.breakpoints} - {0})
        hints: dict[str, Any] = {"branch_tokens": lengths} if lengths else {}
        if self.category:
            hints["category"] = self.category
        if self.is_explicit:
            hints["useful_tokens"] = max(lengths, default=0)
        return hints


NO_CACHING: Final = Caching()

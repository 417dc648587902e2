"""What a node tells of a prefill and of its push to another node."""

import msgspec


class PrefillOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """`kv_transfer_params` of a prefill leg's answer. Times are seconds since the start of the job on its node."""

    delivered: bool = False
    num_tokens: int = 0
    cached_tokens: int = 0
    bytes_total: int = 0
    bytes_before_prefill_end: int | None = 0  # None: unknown
    bytes_saved: int = 0
    codecs: dict[str, int] = {}
    prefill_start_s: float = 0.0
    prefill_end_s: float = 0.0
    delivered_s: float = 0.0
    link: str = ""
    reason: str = ""

"""The [node.coding] table: how a node codes KVCache for other nodes, and which coding it accepts. By default, none.

    [node.coding]
    accept_quantised = true                 # as a receiver; else senders hear that it takes exact bytes only
    reuse_quantised = false                 # what was quantised on its way does not become prefix cache
    max_cores = 2.0                         # as a sender, over all lines; by default a quarter of those that the node may use
    [node.coding.full_attention]            # as a sender, by kind of group
    compression = "auto"                    # "off", "auto" (while the link is the bottleneck), "zstd" (always)
    quantisation = "int8"                   # "off", "int8", "fp8"
    quantise_when = "bottleneck"            # or "always": tokens then do not depend on the load of the link

KVCache that was quantised serves the request that it was made for. Other requests would take it for exact, and so would other
nodes that it is copied to: hence it is not committed to the prefix cache unless `reuse_quantised` says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from hybrid_cache.layout.spec import FullAttention, KVCacheSpec, LinearState, SlidingWindow
from transport.coding.choice import CodingPolicy, Compression
from transport.coding.codec import Codec, decodable, zstd_module
from transport.control.settings import SettingsError, build

KIND_OF: Final[dict[type[KVCacheSpec], str]] = {
    FullAttention: "full_attention",
    SlidingWindow: "sliding_window",
    LinearState: "linear_state",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Coding:
    """The [node.coding] table."""

    accept_quantised: bool = False
    reuse_quantised: bool = False
    max_cores: float | None = None
    full_attention: CodingPolicy = field(default_factory=CodingPolicy)
    sliding_window: CodingPolicy = field(default_factory=CodingPolicy)
    linear_state: CodingPolicy = field(default_factory=CodingPolicy)

    def __post_init__(self) -> None:
        if self.reuse_quantised and not self.accept_quantised:
            raise SettingsError("reuse_quantised = true: allowed only with accept_quantised, which is false")
        if self.max_cores is not None and not 0 < self.max_cores < float("inf"):
            raise SettingsError(f"max_cores = {self.max_cores}: must be above 0 and finite")
        for name in KIND_OF.values():
            check_installed(name, getattr(self, name), has_zstd=zstd_module() is not None)

    @property
    def off(self) -> bool:
        """Whether KVCache leaves as it is."""
        return self.full_attention.off and self.sliding_window.off and self.linear_state.off

    @property
    def taken(self) -> Codec:
        """What senders may use."""
        return decodable(lossy=self.accept_quantised)

    def policy(self, spec: KVCacheSpec) -> CodingPolicy:
        """How groups of a kind may be coded."""
        policy: CodingPolicy = getattr(self, KIND_OF[type(spec)])
        return policy


def coding_of(table: Any, where: str = "coding") -> Coding:
    """Parses the table. Raises SettingsError."""
    return build(Coding, dict(table) if isinstance(table, Mapping) else table, where)


def check_installed(name: str, policy: CodingPolicy, *, has_zstd: bool) -> None:
    """Raises SettingsError for a policy that needs a package which is not there."""
    if policy.compression is not Compression.OFF and not has_zstd:
        raise SettingsError(
            f'{name}: compression = "{policy.compression}": it needs the zstd extra (pip install "prfaas[zstd]")'
        )

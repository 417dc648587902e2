"""`[gateway.fleet]`: what this gateway decides together with others."""

import re
from dataclasses import dataclass
from typing import Final

from membership.etcd.settings import EtcdConfig
from transport.control.settings import require, require_range

NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
MOST_GATEWAYS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """`[gateway.fleet]`. All gateways with the same `etcd` and prefix give out tenants' limits together.

    `name` is another one for each gateway, the same after its restart; without one it is made of the host's and the port. Until
    etcd has answered for the first time, a gateway gives out its part of `gateways`.
    """

    etcd: EtcdConfig | None = None
    name: str = ""
    gateways: int = 2

    def __post_init__(self) -> None:
        what = "letters, digits, '.', '_' and '-', 64 at most"
        require(not self.name or bool(NAME.fullmatch(self.name)), "name", self.name, what)
        require_range("gateways", self.gateways, 1, MOST_GATEWAYS)

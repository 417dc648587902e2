"""What a listener between two machines must not read, in the forms in which it could be written there."""

import base64
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote

from tests.borders.capture import Flow

MIN_BYTES: Final = 8  # what is shorter could be there by chance

# What every HTTP request, answer and RPC of ours has in it, whatever else is secret there.
PROTOCOL: Final = (
    b"POST /v1/", b"GET /prfaas/", b"GET /metrics", b"HTTP/1.1 200", b"Authorization: Bearer", b"chat.completion",
    b"kv_transfer_params", b"/prfaas.node.v1.NodeAgent/", b"PRI * HTTP/2.0",
)  # fmt: skip


def forms(secret: bytes) -> Iterator[bytes]:
    """The bytes themselves, in hexadecimal, in base64 at any place of a longer text, and as JSON and URLs write texts."""
    yield secret
    yield secret.hex().encode()
    yield secret.hex().upper().encode()
    for shift in range(3):
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            # The first and the last characters depend on neighbours.
            begin, end = (shift * 8 + 5) // 6, (shift + len(secret)) * 8 // 6
            yield encode(bytes(shift) + secret)[begin:end]
    try:
        text = secret.decode()
    except UnicodeDecodeError:
        return
    yield json.dumps(text)[1:-1].encode()
    yield json.dumps(text, ensure_ascii=False)[1:-1].encode()
    yield quote(text).encode()


@dataclass(slots=True)
class Secrets:
    """By what they are."""

    by_kind: dict[str, set[bytes]] = field(default_factory=lambda: defaultdict(set))

    def add(self, kind: str, *secrets: bytes | str) -> None:
        for secret in secrets:
            data = secret.encode() if isinstance(secret, str) else secret
            assert len(data) >= MIN_BYTES, f"{kind} {data!r} is too short to be told from chance"
            self.by_kind[kind].add(data)

    def found(self, said: Mapping[Flow, Iterable[bytes]]) -> Counter[str]:
        """How many of each kind can be read there."""
        heard = [part for parts in said.values() for part in parts]
        return Counter(
            kind
            for kind, secrets in self.by_kind.items()
            for secret in secrets
            if any(form in part for form in set(forms(secret)) for part in heard)
        )

    def where(self, said: Mapping[Flow, Iterable[bytes]]) -> list[str]:
        """A line for each flow with a secret in it, for a test that fails."""
        lines = []
        for flow, parts in said.items():
            for kind, count in self.found({flow: parts}).items():
                lines.append(
                    f"{kind} ({count}) from {flow.source}:{flow.source_port} to {flow.target}:{flow.target_port}"
                )
        return lines

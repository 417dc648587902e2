"""`[gateway.traces]`: where spans go."""

from dataclasses import dataclass

from transport.control.settings import require, require_range


@dataclass(frozen=True, slots=True, kw_only=True)
class TracesConfig:
    """`[gateway.traces]`: spans go to an OTLP collector's `endpoint` over HTTP; "": no traces.

    Of requests that come without a decision of their caller's a share `sample` is traced.
    """

    endpoint: str = ""
    sample: float = 1.0

    def __post_init__(self) -> None:
        require_range("traces.sample", self.sample, 0, 1)
        is_url = self.endpoint.startswith(("http://", "https://"))
        require(
            not self.endpoint or is_url, "traces.endpoint", self.endpoint, "a URL, like http://127.0.0.1:4318/v1/traces"
        )

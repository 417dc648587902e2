"""The outcome of a transfer, as either end reports it."""

from dataclasses import dataclass
from typing import Final

# A chunk that fails its checksum this often does so for a reason that another try will not cure.
MAX_REJECTED_CHUNKS: Final = 16


@dataclass(frozen=True, slots=True)
class TransferOutcome:
    """How a transfer ended, for one end. `code` is a frames.Code, empty when it went well."""

    code: str = ""
    detail: str = ""

    @property
    def ok(self) -> bool:
        return not self.code

"""A person, or a program, that looks at a gateway or changes it."""

from dataclasses import dataclass

from gateway.config.operators import OperatorRole


@dataclass(frozen=True, slots=True)
class Operator:
    """Who it is, and what it may do. A token of `issuer` names it until then, or a key of the gateway's file does ("").

    `terms` stand for the settings by which its token was checked.
    """

    name: str = ""
    role: OperatorRole = OperatorRole.ADMIN
    issuer: str = ""
    until_unix_s: float | None = None
    terms: str = ""

    def __str__(self) -> str:
        return f"{self.name} of {self.issuer}" if self.issuer else self.name

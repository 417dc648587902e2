"""The models of a first system: what names them on the command line, and their tables in the gateway's file."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from prfaas.errors import InitError


@dataclass(frozen=True, slots=True)
class SiteModel:
    """A model in `path`; clients call it `name`, or where that is "" as its folder is called."""

    path: str
    name: str = ""

    @classmethod
    def parse(cls, text: str) -> "SiteModel":
        """`DIR` or `NAME=DIR`. Raises InitError."""
        name, equals, path = text.rpartition("=")
        if (equals and not name.strip()) or not path.strip():
            raise InitError(f"model {text!r}: must be DIR or NAME=DIR")
        return cls(path.strip(), name.strip())

    @property
    def called(self) -> str:
        return self.name or Path(self.path).name


def check_models(models: Sequence[SiteModel]) -> None:
    """Raises InitError where two have one name."""
    names = [each.called for each in models]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InitError(f"models {', '.join(twice)}: two have this name; give each another, as NAME=DIR")


def model_tables(models: Sequence[SiteModel]) -> Iterator[str]:
    """`[[gateway.models]]` of the models beside the default one. Their nodes call them so."""
    for each in models:
        yield from ("", "[[gateway.models]]", f"{f'name = {json.dumps(each.called)}':<40} # what clients call it")
        yield f"tokenizer_dir = {json.dumps(each.path)}"


def own_model(model: SiteModel, more_models: Sequence[SiteModel]) -> str:
    """What a node's table in a topology says of its model, if it is not the one of all."""
    if model not in more_models:
        return ""
    return f", model = {json.dumps(model.path)}, served_model = {json.dumps(model.called)}"

"""`[[gateway.models]]`: the models of one gateway, and which of them a node serves.

[[gateway.models]]
name = "chat"                        # as clients call it, and nodes, unless `nodes` says otherwise
aliases = ["gpt-4o"]                 # further names for clients
tokenizer_dir = "models/chat"
threshold_tokens = 8192              # default: the gateway's
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gateway.config.plan import PlanConfig
from transport.control.settings import SettingsError, require

REST: Final = ""  # the key of the model that `tokenizer_dir` of the gateway is of
MOST_MODELS: Final = 32  # at once: each has a tokenizer, readers and a line of its own
FOLDER: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTable:
    """`[[gateway.models]]`. `nodes` are the names by which nodes announce it; without, its own name.

    Clients may call it by its name, by `aliases`, and by what its nodes call it. Without a `tokenizer_dir` it has the folder of
    its name in the gateway's `models_dir`. Without `threshold_tokens` the gateway's holds. `plan` is of this model alone.
    """

    name: str
    nodes: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    tokenizer_dir: Path | None = None
    threshold_tokens: float | None = None
    revisions: tuple[str, ...] = ()
    plan: PlanConfig = field(default_factory=PlanConfig)

    def __post_init__(self) -> None:
        for name in (*self.nodes, *self.aliases):
            require(bool(name), "nodes and aliases", name, "names")
        threshold = self.threshold_tokens
        require(threshold is None or threshold >= 0, "threshold_tokens", threshold, "a number of at least 0")

    @property
    def announced(self) -> tuple[str, ...]:
        """How its nodes call it."""
        return self.nodes or (self.name,)


@dataclass(frozen=True, slots=True)
class ModelCatalog:
    """The models of a gateway, the default one first. The one called `REST` has the nodes that no other one names.

    Clients call that one `served_model`, or "" what its nodes call it.
    """

    models: tuple[ModelTable, ...] = (ModelTable(name=REST),)
    served_model: str = ""

    @property
    def default(self) -> str:
        """The key of the model of a request that names none."""
        return self.models[0].name

    @property
    def is_single(self) -> bool:
        """Whether there is one for all nodes, whatever they call it."""
        return [each.name for each in self.models] == [REST]

    def of_node(self, announced: str) -> str | None:
        """The key of the model that a node announces so; None: this gateway has no such model."""
        for each in self.models:
            if each.name != REST and announced in each.announced:
                return each.name
        return REST if any(each.name == REST for each in self.models) else None

    def shown(self, key: str) -> str:
        """What clients call it, "" where only its nodes know."""
        return key or self.served_model

    def by_name(self, key: str) -> ModelTable | None:
        """None for a model that is not of this gateway."""
        return next((each for each in self.models if each.name == key), None)

    def with_found(self, names: Collection[str]) -> "ModelCatalog":
        """These beside them, as far as there is room, each by the name that nodes announce."""
        known = {each.name for each in self.models}
        found = [ModelTable(name=name) for name in sorted(names) if name not in known]
        return ModelCatalog((*self.models, *found[: MOST_MODELS - len(self.models)]), self.served_model)


def ordered(models: Sequence[ModelTable], default: str) -> tuple[ModelTable, ...]:
    """The default one first: the first where none is named."""
    return tuple(sorted(models, key=lambda each: bool(default) and each.name != default))


def check_models(models: Sequence[ModelTable], served_model: str, default: str, models_dir: Path | None) -> None:
    """Raises SettingsError for models without a name or a tokenizer, and for names that two have."""
    require(len(models) < MOST_MODELS, "models", len(models), f"fewer than {MOST_MODELS} tables")
    for each in models:
        require(bool(each.name), "models.name", each.name, "a name")
        has_folder = models_dir is not None and bool(FOLDER.fullmatch(each.name))
        if each.tokenizer_dir is None and not has_folder:
            raise SettingsError(
                f"models: {each.name!r} has no tokenizer_dir, and no folder of `models_dir` can have its name"
            )
    for what in ("announced", "called"):
        names = [name for each in models for name in _names(each, what)] + ([served_model] if served_model else [])
        twice = sorted({name for name in names if names.count(name) > 1})
        require(not twice, "models", twice, "each name with one model")
    keys = [each.name for each in models]
    known = ", ".join([*keys, *([served_model] if served_model else [])])
    require(not default or default in [*keys, served_model], "default_model", default, f"one of {known}")


def _names(model: ModelTable, what: str) -> set[str]:
    return set(model.announced) if what == "announced" else {model.name, *model.aliases}

"""`[[gateway.models]]`: the models of one gateway, and which of them a node serves.

[[gateway.models]]
name = "chat"                        # as clients call it, and nodes, unless `nodes` says otherwise
aliases = ["gpt-4o"]                 # further names for clients
tokenizer_dir = "models/chat"
threshold_tokens = 8192              # default: the gateway's
"""

import re
from collections.abc import Collection, Iterable, Sequence
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
    its name in the gateway's `models_dir`. Without `threshold_tokens` the gateway's holds. `max_in_flight`
    are the requests that it may have among the gateway's. `plan` is of this model alone.
    """

    name: str
    nodes: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    tokenizer_dir: Path | None = None
    threshold_tokens: float | None = None
    max_in_flight: int | None = None
    revisions: tuple[str, ...] = ()
    plan: PlanConfig = field(default_factory=PlanConfig)

    def __post_init__(self) -> None:
        for name in (*self.nodes, *self.aliases):
            require(bool(name), "nodes and aliases", name, "names")
        most = self.max_in_flight
        require(most is None or most >= 1, "max_in_flight", most, "at least 1")
        threshold = self.threshold_tokens
        require(threshold is None or threshold >= 0, "threshold_tokens", threshold, "a number of at least 0")

    @property
    def announced(self) -> tuple[str, ...]:
        """How its nodes call it."""
        return self.nodes or (self.name,)

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may call it by the file, and each name once."""
        return tuple(dict.fromkeys((self.name, *self.aliases, *self.announced)))


@dataclass(frozen=True, slots=True)
class ModelCatalog:
    """The models of a gateway, the default one first. The one called `REST` has the nodes that no other one names.

    Clients call that one `served_model`, or "" what its nodes call it. With a `models_dir` it has only nodes whose names are
    `without_folder` there: the others wait for a model of their own.
    """

    models: tuple[ModelTable, ...] = (ModelTable(name=REST),)
    served_model: str = ""
    without_folder: frozenset[str] | None = None  # None: there is no `models_dir`

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
        has_rest = any(each.name == REST for each in self.models)
        return REST if has_rest and not self.awaits(announced) else None

    def awaits(self, announced: str) -> bool:
        """Whether it has not been looked yet if `models_dir` has a folder for nodes that call their model so, or it has one."""
        return self.without_folder is not None and announced not in self.without_folder

    def named(self, name: str) -> str | None:
        """The key of the model that the file gives this name; None: none, but nodes may have one."""
        for each in self.models if name else ():
            if name in (each.names if each.name != REST else (self.served_model,)):
                return each.name
        return None

    def shown(self, key: str) -> str:
        """What clients call it, "" where only its nodes know."""
        return key or self.served_model

    def by_name(self, key: str) -> ModelTable | None:
        """None for a model that is not of this gateway."""
        return next((each for each in self.models if each.name == key), None)

    def with_found(self, names: Iterable[str], without_folder: Collection[str] = ()) -> "ModelCatalog":
        """These beside them, the first ones if there is no room for all, each by the name that nodes announce."""
        known = {each.name for each in self.models}
        found = [ModelTable(name=name) for name in names if name not in known]
        rest = None if self.without_folder is None else self.without_folder.union(without_folder)
        return ModelCatalog((*self.models, *found[: MOST_MODELS - len(self.models)]), self.served_model, rest)


def ordered(models: Sequence[ModelTable], default: str) -> tuple[ModelTable, ...]:
    """The default one first: the first where none is named."""
    return tuple(sorted(models, key=lambda each: bool(default) and each.name != default))


def check_models(
    models: Sequence[ModelTable], served_model: str, default: str, models_dir: Path | None, workers: int = 1
) -> None:
    """Raises SettingsError for models without a name or a tokenizer, for names that two have, and for a `max_in_flight` that
    workers cannot divide.
    """
    require(len(models) < MOST_MODELS, "models", len(models), f"fewer than {MOST_MODELS} tables")
    for each in models:
        require(bool(each.name), "models.name", each.name, "a name")
        most, wanted = each.max_in_flight, f"at least the number of workers, {workers}"
        require(most is None or most >= workers, f"models: {each.name!r}: max_in_flight", most, wanted)
        has_folder = models_dir is not None and bool(FOLDER.fullmatch(each.name))
        if each.tokenizer_dir is None and not has_folder:
            raise SettingsError(
                f"models: {each.name!r} has no tokenizer_dir, and no folder of `models_dir` can have its name"
            )
    names = [name for each in models for name in each.names] + ([served_model] if served_model else [])
    twice = sorted({name for name in names if names.count(name) > 1})
    require(not twice, "models", twice, "each name with one model")
    keys = [each.name for each in models]
    known = ", ".join([*keys, *([served_model] if served_model else [])])
    require(not default or default in [*keys, served_model], "default_model", default, f"one of {known}")

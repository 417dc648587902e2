"""The models that are served, each in one revision or, while its nodes go from one to the next, in several.

Only nodes of one revision can use each other's KVCache: their layouts have one fingerprint, and they are paired alike. Nodes of
two models are of two revisions, also if their weights are the same.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from gateway.api.unsupported import UnsupportedFields
from gateway.cluster.agent_values import NodeInfo
from gateway.config.models import REST, ModelCatalog, ModelTable
from gateway.prompt.prompt import Hashing, PromptModel
from hybrid_cache.hashing.name_secrets import UNKEYED, NameSecrets
from hybrid_cache.layout.layout import ModelLayout
from planner.decisions.views import Role

log = logging.getLogger("prfaas.gateway.clusters")

SHORT_CHARS: Final = 12
MOST_REVISIONS: Final = 8  # at once: each prompt is hashed for each


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A revision of the model served: equal layouts, so that the KVCache of one node is the KVCache of the other."""

    name: str
    model_id: str
    layout: ModelLayout
    max_model_len: int
    hashing: Hashing
    not_done: UnsupportedFields = field(default_factory=UnsupportedFields)
    adapters: frozenset[str] = frozenset()  # of the model, that some decode node serves
    takes_media: bool = False  # some decode node does
    is_paired: bool = False  # engines are paired by rooms (`gateway.upstream.sglang_bootstrap`), else by tickets
    key: str = REST  # of its model among those of the gateway
    aliases: tuple[str, ...] = ()

    @property
    def revision(self) -> str:
        """Which nodes can use each other's KVCache: those of one revision."""
        return _revision(self.layout.fingerprint, self.key, is_paired=self.is_paired)

    @property
    def called(self) -> tuple[str, ...]:
        """What clients may call it; its adapters have names of their own."""
        return tuple(dict.fromkeys((self.name, *self.aliases, self.model_id)))

    def by(self, nodes: Sequence[NodeInfo]) -> "ServedModel":
        """The same as `nodes` serve it: as long a context as all of them take, and what some of them can do."""
        decodes = [info for info in nodes if info.role == Role.DECODE]
        return replace(
            self,
            max_model_len=min((info.max_model_len for info in nodes), default=self.max_model_len),
            not_done=UnsupportedFields.of(info.not_done_json for info in nodes),
            adapters=frozenset(name for info in decodes for name in info.adapters) - {self.name, self.model_id},
            takes_media=any(info.takes_media for info in decodes),
        )

    def as_read(
        self, group: str = "", media_domains: frozenset[str] = frozenset(), others: "Sequence[ServedModel]" = ()
    ) -> PromptModel:
        """The model as reading a prompt of one of `group` sees it, with media at addresses of these domains.

        Its prompts have names for `others`, too: other revisions of it.
        """
        hashing = self.hashing.of_group(group) if group else self.hashing
        ids = dict.fromkeys(each.model_id for each in (self, *others))
        return PromptModel(
            names=(self.name, *self.aliases, *ids),
            revision=self.revision,
            others=tuple((each.revision, each.hashing.of_group(group)) for each in others),
            max_model_len=self.max_model_len,
            hashing=hashing,
            adapters=self.adapters,
            takes_media=self.takes_media,
            media_domains=media_domains,
        )


def hashing_by(secrets: NameSecrets, layout: ModelLayout) -> Hashing:
    """How blocks of a model are named by the first of `secrets`, and by those before it."""
    hashing = None
    for salt, key in zip(secrets.model_salts(layout.fingerprint)[::-1], secrets.namespace_keys()[::-1], strict=True):
        hashing = Hashing(layout.block_size, salt, key=key, earlier=hashing)
    assert hashing is not None
    return hashing


def salt_of(layout: ModelLayout, secrets: NameSecrets = UNKEYED) -> bytes:
    """What block hashes of prompts for a model start from, for those who share them with everybody; equal at every gateway."""
    return hashing_by(secrets, layout).salt


def revision_of(info: NodeInfo, key: str = REST) -> str:
    """The revision of the model `key` that a node is of; "" before its engine has said what it runs."""
    return _revision(info.layout_fingerprint, key, is_paired=info.rooms is not None) if info.layout_json else ""


def why_not(info: NodeInfo, key: str | None, revisions: Collection[str]) -> str:
    """Why a node of the model `key` (None: of none) is not used, which is of none of these revisions of it."""
    if key is None:
        return f"no model of this gateway has nodes that call theirs {info.model_id!r}"
    if len(revisions) < MOST_REVISIONS:
        return "it has another model than the one served, and `revisions` does not name both"
    return f"it is of another revision than the {MOST_REVISIONS} that are served: there can be no more at once"


def short(revision: str) -> str:
    """As operators see it."""
    return revision[:SHORT_CHARS]


def _revision(fingerprint: str, key: str, *, is_paired: bool) -> str:
    paired = f"{fingerprint}+rooms" if is_paired else fingerprint
    return f"{paired}@{key}" if key != REST else paired


def served_as(
    info: NodeInfo,
    layout: ModelLayout,
    name: str = "",
    secrets: NameSecrets = UNKEYED,
    key: str = REST,
    aliases: tuple[str, ...] = (),
) -> ServedModel:
    """The revision that a node is of, by that name or the node's own."""
    return ServedModel(
        name=name or info.model_id,
        model_id=info.model_id,
        layout=layout,
        max_model_len=info.max_model_len,
        hashing=hashing_by(secrets, layout),
        is_paired=info.rooms is not None,
        key=key,
        aliases=aliases,
    )


def others_of(revisions: Mapping[str, ServedModel], served: ServedModel) -> list[ServedModel]:
    """The other revisions of its model among these."""
    return [each for name, each in revisions.items() if each.key == served.key and name != served.revision]


def revisions_among(
    infos: Sequence[NodeInfo],
    layouts: Mapping[str, ModelLayout],
    former: str,
    accepted: Collection[str],
    named: Callable[[NodeInfo, ModelLayout], ServedModel],
    key: str = REST,
) -> dict[str, ServedModel]:
    """The revisions of the model `key` that its connected nodes have, by name; the first one stands for the model.

    That is the `former` one as long as a node has it, else the first that is described. Beside it count those whose model has
    the same identity, or one that is `accepted`: those of most nodes, if there are too many. `layouts` are those of `infos`, by
    fingerprint.
    """
    by_revision: dict[str, list[NodeInfo]] = {}
    for info in infos:
        if (revision := revision_of(info, key)) and info.layout_fingerprint in layouts:
            by_revision.setdefault(revision, []).append(info)
    if not by_revision:
        return {}
    first = former if former in by_revision else next(iter(by_revision))
    identity = layouts[by_revision[first][0].layout_fingerprint].model
    found = {}
    for revision in sorted(by_revision, key=lambda each: (each != first, -len(by_revision[each]), each)):
        of_it = by_revision[revision]
        layout = layouts[of_it[0].layout_fingerprint]
        if revision == first or layout.model == identity or {layout.model, identity} <= set(accepted):
            found[revision] = named(of_it[0], layout).by(of_it)
        if len(found) == MOST_REVISIONS:
            break
    return found


@dataclass(frozen=True, slots=True)
class ServedModels:
    """The models of a gateway as nodes have them: `models` by key, each as all its revisions hold; `revisions` of all."""

    catalog: ModelCatalog
    models: Mapping[str, ServedModel] = field(default_factory=dict)
    revisions: Mapping[str, ServedModel] = field(default_factory=dict)

    def of_node(self, info: NodeInfo) -> str | None:
        """The key of the model that a node has; None: none of these."""
        return self.catalog.of_node(info.model_id)

    def why_unused(self, info: NodeInfo) -> str:
        """Why no decision sees a node, whatever its state; "": they do."""
        key = self.of_node(info)
        if key is not None and revision_of(info, key) in self.revisions:
            return ""
        if key is None and self.catalog.awaits(info.model_id):
            return f"`models_dir` has no tokenizer for {info.model_id!r} yet, or there is no room for another model"
        return why_not(info, key, [name for name, served in self.revisions.items() if served.key == key])

    def by(
        self,
        infos: Sequence[NodeInfo],
        layouts: Mapping[str, ModelLayout],
        secrets: NameSecrets = UNKEYED,
        lost: Sequence[NodeInfo] = (),
    ) -> "ServedModels":
        """As these connected nodes have them now. The last revisions of a model without any stay.

        They stay, too, while nodes of theirs are only `lost`, and those that are connected call their model otherwise.
        """
        models, revisions = dict[str, ServedModel](), dict[str, ServedModel]()
        for each in self.catalog.models:
            mine = [info for info in infos if self.of_node(info) == each.name]
            former, before = self._of(each.name), self.models.get(each.name)
            found = self._found(each, mine, layouts, secrets)
            if not found or (before is not None and self._is_only_lost(each, before, found, lost)):
                if before is not None:
                    models |= _renamed({each.name: before}, secrets)
                    revisions |= _renamed(former, secrets)
                continue
            _told(former, found, before)
            revisions |= found
            first = next(iter(found.values()))
            models[each.name] = first.by([info for info in mine if revision_of(info, each.name) in found])
        return replace(self, models=models, revisions=revisions)

    def _of(self, key: str) -> dict[str, ServedModel]:
        return {name: each for name, each in self.revisions.items() if each.key == key}

    def _is_only_lost(
        self, table: ModelTable, before: ServedModel, found: Mapping[str, ServedModel], lost: Sequence[NodeInfo]
    ) -> bool:
        """Whether another model would answer in this one's name, though nodes with this one are members still."""
        first = next(iter(found.values()))
        is_other = first.model_id != before.model_id and first.layout.model != before.layout.model
        if not is_other or {first.layout.model, before.layout.model} <= set(table.revisions):
            return False
        if not any(
            self.of_node(info) == table.name and revision_of(info, table.name) == before.revision for info in lost
        ):
            return False
        log.error(
            "model %s is not replaced by %s: nodes that have it are lost, and may come back; remove them if they do not",
            before.model_id, first.model_id,
        )  # fmt: skip
        return True

    def _found(
        self, table: ModelTable, infos: Sequence[NodeInfo], layouts: Mapping[str, ModelLayout], secrets: NameSecrets
    ) -> dict[str, ServedModel]:
        """The first layout described is that of the model, until none of its connected nodes has it any more."""
        key, before = table.name, self.models.get(table.name)
        named = partial(served_as, name=self.catalog.shown(key), secrets=secrets, key=key, aliases=table.aliases)
        former = before.revision if before is not None else ""
        return revisions_among(infos, layouts, former, table.revisions, named, key)


def _renamed(served: Mapping[str, ServedModel], secrets: NameSecrets) -> dict[str, ServedModel]:
    return {name: replace(each, hashing=hashing_by(secrets, each.layout)) for name, each in served.items()}


def _told(former: Mapping[str, ServedModel], found: Mapping[str, ServedModel], before: ServedModel | None) -> None:
    """Logs what is different."""
    first, *later = found.values()
    if before is not None and before.revision != first.revision:
        log.warning("model %s is served from now on: no node has %s any more", first.model_id, before.model_id)
    for name in found.keys() - former.keys() if later else ():
        log.info("revision %s of %s joins %d others", short(name), first.name, len(found) - 1)

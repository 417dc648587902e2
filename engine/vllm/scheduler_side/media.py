"""Images in vLLM's requests: their names, their places, and what its workers keep of them.

As in `engine.vllm.internals`, what is read or changed here is no interface of vLLM's (`tests/vllm/test_contract.py`).
"""

import dataclasses
import functools
import importlib.metadata
from collections.abc import Sequence
from typing import Any, Final

from engine.vllm.identity import text_of
from hybrid_cache.hashing.block_hash import MEDIUM, Inset

TRAVELS: Final = frozenset(
    {"image"}
)  # kinds of media that were run; what is heard, or moves, stays where it is decoded
# Settings of media that change neither what is seen nor how it is computed.
SEEN_ALIKE: Final = frozenset(
    {"limit_per_prompt", "enable_mm_embeds", "mm_processor_cache_gb", "mm_processor_cache_type", "mm_hasher_algorithm"}
    | {"mm_shm_cache_max_object_size_mb", "mm_encoder_tp_mode", "skip_mm_profiling", "mm_tensor_ipc"}
    | {"mm_ipc_gpu_memory_gb", "allow_missing_mm_embeddings", "language_model_only"}
)
SIGHT: Final = ("transformers", "pillow", "torchvision")  # who makes pixels of an image


def takes_media(vllm_config: Any) -> bool:
    """Whether the model sees or hears, and has not been told to leave that."""
    media = vllm_config.model_config.multimodal_config
    return media is not None and not media.language_model_only


def insets_of(request: Any) -> tuple[Inset, ...]:
    """The insets of a prompt, in order."""
    return tuple(Inset(feature.mm_position.offset, feature.identifier) for feature in request.mm_features)


def reaches_the_end(request: Any) -> bool:
    """Whether the last token of a prompt, which is computed where it is decoded, is a medium's."""
    return any(stop_of(feature) >= request.num_prompt_tokens for feature in request.mm_features)


def is_named(feature: Any) -> bool:
    """Whether a medium is called by what it is, and may travel."""
    return feature.modality in TRAVELS and str(feature.identifier).startswith(MEDIUM)


def stop_of(feature: Any) -> int:
    """Where a medium's placeholders end."""
    place = feature.mm_position
    return int(place.offset + place.length)


def name_media() -> None:
    """From now on this process names images by content and by how the server sees them. So servers of equal settings
    give equal names, and no client can imitate one. vLLM's own names contain the model's path, and a client's `uuid`
    may stand for any image. Doing it again changes nothing.
    """
    from vllm.multimodal.processing import BaseMultiModalProcessor

    base: Any = BaseMultiModalProcessor
    was = getattr(base, "_get_mm_hashes", None)
    if was is None or hasattr(was, "__wrapped__"):  # None: a release that names them elsewhere, so its images stay
        return

    @functools.wraps(was)
    def get_mm_hashes(self: Any, inputs: Any) -> Any:
        config = self.info.ctx.get_mm_config()
        found = inputs.get_mm_hashes(_sight(config), config.mm_hasher_algorithm)
        given = inputs.mm_uuid_items or {}
        # An image's name must determine its embedding. Two cases break that. Pruned videos move all that follows by
        # what their encoder says. Some models see an image differently beside others, and their processors cache by
        # rules of their own.
        caches_alike = type(self)._cached_apply_hf_processor is base._cached_apply_hf_processor
        kinds = TRAVELS if caches_alike and not config.video_pruning_rate else frozenset[str]()
        return {kind: _marked(names, given.get(kind), kind in kinds) for kind, names in found.items()}

    base._get_mm_hashes = get_mm_hashes


def _marked(names: Sequence[str], given: Sequence[str | None] | None, may_travel: bool) -> list[str]:
    by_client = given if given is not None else [None] * len(names)
    return [
        MEDIUM + name if may_travel and uuid is None else _not_ours(name)
        for name, uuid in zip(names, by_client, strict=True)
    ]


def _not_ours(name: str) -> str:
    return f"uuid-{name}" if name.startswith(MEDIUM) else name


def _sight(config: Any) -> str:
    """How a server sees, in the place of the model's path: the model itself, weights and files, is in its layout's name."""
    fields = [field.name for field in dataclasses.fields(config) if field.name not in SEEN_ALIKE]
    return "\n".join([*(f"{name}: {text_of(getattr(config, name))}" for name in fields), *_versions()])


@functools.cache
def _versions() -> tuple[str, ...]:
    return tuple(f"{name}: {_version(name)}" for name in SIGHT)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def keep_media() -> None:
    """vLLM sends workers no pixels of images whose KVCache is there when a request is first scheduled. Its first model
    runner never gets them later. A request that is then preempted and computed ends its server ("Encoder cache miss").
    Each landing would be such a request, so workers get all pixels.
    """
    from vllm.v1.core.sched import output

    def spare_nothing(mm_features: Any, num_computed_tokens: int, uses_mrope: bool = False) -> Any:
        return mm_features

    output.strip_covered_mm_data = spare_nothing

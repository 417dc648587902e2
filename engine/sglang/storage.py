"""Experimental: the agent's pages as SGLang's storage, written and read ahead by its hierarchical cache.

    --enable-hierarchical-cache --hicache-mem-layout layer_first --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "prfaas", "module_path": "engine.sglang.storage",
        "class_name": "PrfaasStorage", "interface_v1": 1, "hicache_storage_pass_prefix_keys": true, "agent_socket": "/run/..."}'

SGLang's interface, of 0.5.23: two threads of the scheduler's process call `HiCacheStorage`. One asks and reads ahead of
a request, the other writes computed pages; `keys` are names of pages, and `extra_info.prefix_keys` the names of all
pages before them; `host_indices` are the rows of their tokens in the host pool.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import sglang
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from sglang.srt.runtime_context import get_server_args

from engine.agent.block_copies import Bytes
from engine.errors import PagesInvalid
from engine.sglang.identity import kv_identity
from engine.sglang.layout import KV_POOL, HostPool, Ranks, layout_of, names_of, refusal_of
from engine.sglang.metrics import FallbackMetric
from engine.sglang.store import BlockStore
from engine.sglang.version import is_tested, untested
from transport.path.tcp import format_address

log = logging.getLogger(__name__)


class PrfaasStorage(HiCacheStorage):  # type: ignore[misc]
    """One server's storage: the prefix cache of its node."""

    def __init__(self, storage_config: Any, factory_options: Mapping[str, Any] | None = None) -> None:
        """Raises ValueError for settings with which it cannot be used."""
        settings = storage_config.extra_config or {}
        if not settings.get("agent_socket"):
            raise ValueError(
                "agent_socket is missing in --hicache-storage-backend-extra-config: the socket of the node's agent"
            )
        if not settings.get("interface_v1"):
            raise ValueError(
                '--hicache-storage-backend-extra-config needs "interface_v1": 1: pages are copied where they lie'
            )
        self._socket = Path(settings["agent_socket"])
        self._revision = str(settings.get("model_revision", ""))
        self._ranks = Ranks(
            tensor=storage_config.tp_size,
            pipeline=storage_config.pp_size,
            context=storage_config.attn_cp_size,
            dp_rank=storage_config.dp_rank,
        )
        self._store: BlockStore | None = None
        self._rows: list[tuple[torch.Tensor, torch.Tensor]] = []

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool that pages are copied from and to; joins the agent. Raises ValueError for one that cannot be served."""
        super().register_mem_pool_host(mem_pool_host)
        pool = host_pool(mem_pool_host)
        if (refusal := refusal_of(pool, self._ranks)) is not None:
            raise ValueError(refusal)
        arguments = get_server_args()
        if not arguments.context_length:
            raise ValueError(
                "start the server with --context-length: the node reports the longest prompt that it takes"
            )
        version = str(sglang.__version__)
        notice = "" if is_tested(version) else untested(version)
        if notice:
            log.warning(notice)
        layout = layout_of(kv_identity(arguments, version, self._revision), pool)
        self._rows = [(_rows(k), _rows(v)) for k, v in zip(mem_pool_host.k_buffer, mem_pool_host.v_buffer, strict=True)]
        self._store = BlockStore(
            self._socket,
            layout,
            model_id=arguments.served_model_name or Path(arguments.model_path).name,
            max_model_len=arguments.context_length,
            http_url=f"http://{format_address(arguments.host, arguments.port)}",
            notice=notice,
            on_fallback=FallbackMetric().count,
        )
        self._store.start()

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Raises ValueError for a pool beside that of attention: a window's, a state's, a draft's."""
        if str(host_pool_name) != KV_POOL:
            raise ValueError(
                f"the model has a pool {host_pool_name} beside {KV_POOL}: hybrid and draft models are not supported"
            )

    @property
    def store(self) -> BlockStore:
        """What the pages are kept by. Raises RuntimeError before a pool is registered."""
        if self._store is None:
            raise RuntimeError("no host pool is registered")
        return self._store

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """How many of these pages are there, from the first one on."""
        before = _before(extra_info)
        return max(0, self.store.cached_blocks(names_of([*before, *keys])) - len(before))

    def batch_get_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Copies pages into the host pool; which of them are there now."""
        before = _before(extra_info)
        first_token = len(before) * self.store.layout.block_size
        places = self._places(keys, host_indices)

        def take(layer: int, start: int, k: Bytes, v: Bytes) -> None:
            index = places[start - first_token : start - first_token + len(k)]
            k_rows, v_rows = self._rows[layer]
            k_rows[index], v_rows[index] = torch.from_numpy(k), torch.from_numpy(v)

        loaded = self.store.load(names_of([*before, *keys]), len(before), take)
        return [index < loaded for index in range(len(keys))]

    def batch_set_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Copies pages out of the host pool; all are kept, or none."""
        before = _before(extra_info)
        first_token = len(before) * self.store.layout.block_size
        places = self._places(keys, host_indices)

        def give(layer: int, start: int, stop: int) -> tuple[Bytes, Bytes]:
            index = places[start - first_token : stop - first_token]
            k_rows, v_rows = self._rows[layer]
            return k_rows[index].numpy(), v_rows[index].numpy()

        return [self.store.save(names_of([*before, *keys]), len(before), give)] * len(keys)

    def _places(self, keys: Sequence[str], host_indices: torch.Tensor) -> torch.Tensor:
        """Rows of the pages' tokens in the host pool. Raises PagesInvalid: part of a page has a name in SGLang, too."""
        if len(host_indices) != len(keys) * self.store.layout.block_size:
            size = self.store.layout.block_size
            raise PagesInvalid(f"{len(host_indices)} rows for {len(keys)} pages of {size} tokens")
        return host_indices.cpu()

    def close(self) -> None:
        """Hangs up; what is kept stays."""
        if self._store is not None:
            self._store.close()

    # What SGLang wants to be there, and calls without `interface_v1` only

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        raise NotImplementedError(ONLY_V1)

    def batch_get(self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None) -> None:
        raise NotImplementedError(ONLY_V1)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        raise NotImplementedError(ONLY_V1)

    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        raise NotImplementedError(ONLY_V1)

    def clear(self) -> None:
        raise NotImplementedError("the pages are the node's: they leave by its policy, or with the node")


ONLY_V1: Final = "pages are read and written by batch_get_v1 and batch_set_v1"


def host_pool(pool: Any) -> HostPool:
    """The shape of SGLang's host pool."""
    return HostPool(
        kind=type(pool).__name__,
        arrangement=pool.layout,
        page_tokens=pool.page_size,
        layers=pool.layer_num,
        draft_layers=pool.layer_num - getattr(pool, "target_layer_num", pool.layer_num),
        heads=getattr(pool, "head_num", 0),
        head_elements=getattr(pool, "head_dim", 0),
        v_head_elements=getattr(pool, "v_head_dim", getattr(pool, "head_dim", 0)),
        dtype=str(pool.dtype).removeprefix("torch."),
        item_bytes=pool.dtype.itemsize,
    )


def _before(extra_info: Any) -> list[str]:
    """Names of the pages before. None of them: the keys are a prompt's first ones."""
    return list(getattr(extra_info, "prefix_keys", None) or ())


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """One layer's K or V [tokens, heads, head] as bytes [tokens, bytes], the same memory."""
    return tensor.view(torch.uint8).reshape(len(tensor), -1)

"""Pages of one server's host pool, through two agents, in another's: SGLang's own pools, keys, factory and controller code.

What is absent are its kernels, so there is no model: what is in the pools is drawn by chance.
"""

import itertools
import json
import queue
from dataclasses import dataclass
from typing import Any

import pytest

from engine.errors import PagesInvalid
from tests.sglang.agents import ANSWER_S, Agent
from transport.control.proto import node_pb2 as pb

pytest.importorskip("sglang")

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # what its import warns of is not ours to mend
]

PAGE, LAYERS, PAGES = 16, 3, 12
OURS = {"backend_name": "prfaas", "module_path": "engine.sglang.storage", "class_name": "PrfaasStorage"}
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": LAYERS, "vocab_size": 128,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def _server(tmp_path_factory):
    """What SGLang's scheduler knows of its server, as if one ran here."""
    from sglang.srt import runtime_context
    from sglang.srt.server_args import ServerArgs

    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text(json.dumps(CONFIG))
    (model / "model.safetensors").write_bytes(b"weights")
    patch = pytest.MonkeyPatch()
    patch.setenv("HF_HUB_OFFLINE", "1")
    arguments = ServerArgs(
        model_path=str(model), device="cpu", attention_backend="torch_native", context_length=512,
        enable_hierarchical_cache=True, hicache_storage_backend="dynamic", hicache_mem_layout="layer_first",
    )  # fmt: skip
    runtime_context.publish(arguments, role="scheduler")
    yield
    patch.undo()


@dataclass
class Server:
    """A server's host pool, its storage, and SGLang's controller over both without threads, groups and a device."""

    pool: Any
    storage: Any
    controller: Any

    def alloc(self, pages: int) -> Any:
        return self.pool.alloc(pages * PAGE)

    def prefetch(self, tokens: list[int]) -> tuple[int, Any]:
        """As the prefetching threads do: asks what is there, and has that copied; returns pages and where they are."""
        from sglang.srt.managers.cache_controller import PrefetchOperation

        operation = PrefetchOperation("r", tokens, None, None)
        operation.hash_value, hits = self.controller._storage_hit_query(operation)
        operation.host_indices = self.alloc(hits // PAGE) if hits else None
        return (self.controller._page_transfer(operation) if hits else 0), operation.host_indices

    def back_up(self, tokens: list[int], host_indices: Any, prefix: list[int] | None = None) -> int:
        """As the backing up thread does; returns the tokens that were kept. `prefix`: what is there before them."""
        from sglang.srt.managers.cache_controller import StorageOperation
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        before = get_storage_hash_str(prefix, None, page_size=PAGE) if prefix else []
        names = get_storage_hash_str(tokens, before[-1] if before else None, page_size=PAGE)
        operation = StorageOperation(host_indices, tokens, hash_value=names, prefix_keys=before or None)
        self.controller._page_backup(operation)
        return operation.completed_tokens


def serve(agent: Agent, **changes: Any) -> Server:
    import torch
    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    device = MHATokenToKVPool(
        size=PAGES * PAGE, page_size=PAGE, dtype=torch.bfloat16, head_num=2, head_dim=8, layer_num=LAYERS, device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip
    with host_memory_budget_scope(1 << 30):
        pool = MHATokenToKVPoolHost(
            device.get_device_pool_infos()[0].buffer_info, 4.0, 0, PAGE, changes.pop("layout", "layer_first"),
            pin_memory=False, device_capacity_tokens=PAGES * PAGE, start_layer=0, end_layer=LAYERS,
        )  # fmt: skip
    extra = OURS | {"interface_v1": 1, "agent_socket": str(agent.socket)}
    values: dict[str, Any] = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1, "is_mla_model": False,
        "enable_storage_metrics": False, "is_page_first_layout": False, "model_name": "m", "extra_config": extra,
    }  # fmt: skip
    storage = StorageBackendFactory.create_backend("dynamic", HiCacheStorageConfig(**(values | changes)), pool)
    try:
        storage.register_mem_pool_host(pool)
    except BaseException:
        storage.close()
        raise
    controller = object.__new__(HiCacheController)
    controller.storage_backend, controller.page_size = storage, PAGE
    controller.page_get_func, controller.page_set_func = controller._page_get_zero_copy, controller._page_set_zero_copy
    controller.prefetch_sync_queue = queue.Queue()
    return Server(pool, storage, controller)


def fill(server: Server, index: Any, seed: int) -> None:
    import torch

    chance = torch.Generator().manual_seed(seed)
    for buffer in (server.pool.k_buffer, server.pool.v_buffer):
        buffer[:, index] = torch.randn(buffer[:, index].shape, generator=chance).to(buffer.dtype)


def equal(one: Server, index: Any, other: Server, other_index: Any) -> bool:
    """Bit by bit, of every layer."""
    import torch

    def bits(server: Server, name: str, at: Any) -> Any:
        return getattr(server.pool, name)[:, at].view(torch.int16)

    return all(torch.equal(bits(one, name, index), bits(other, name, other_index)) for name in ("k_buffer", "v_buffer"))


_names = itertools.count()


@pytest.fixture
def agents(tmp_path, _server):
    pair = [Agent(f"s{next(_names)}", tmp_path) for _ in range(2)]
    yield pair
    for agent in pair:
        agent.close()


@pytest.fixture
def servers(agents):
    pair = [serve(agent) for agent in agents]
    assert all(server.storage.store.wait_connected(ANSWER_S) for server in pair)
    yield pair
    for server in pair:
        server.storage.close()


def move(source: Agent, target: Agent, tokens: list[int]) -> None:
    """As a gateway moves a prefix from one node to the other."""
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    names = b"".join(bytes.fromhex(name) for name in get_storage_hash_str(tokens, None, page_size=PAGE))
    ticket = target.stub.Reserve(
        pb.ReserveRequest(request_id="move", num_tokens=len(tokens), block_hashes=names, prefix_only=True),
        timeout=ANSWER_S,
    )
    sent = source.stub.Load(pb.LoadRequest(block_hashes=names, ticket=ticket), timeout=ANSWER_S)
    assert sent.num_tokens == len(tokens)
    done = target.stub.Commit(pb.TransferRef(transfer_id=ticket.transfer_id), timeout=ANSWER_S)
    assert done.ok, done.reason


def tokens_of(pages: int, start: int = 1) -> list[int]:
    return list(range(start, start + pages * PAGE))


def test_pages_of_one_server_are_prefetched_by_another_bit_by_bit(agents, servers):
    prefill, decode = servers
    tokens, index = tokens_of(PAGES), prefill.alloc(PAGES)
    fill(prefill, index, seed=7)
    assert prefill.back_up(tokens, index) == len(tokens)
    assert decode.prefetch(tokens) == (0, None)  # not before it has been sent
    move(*agents, tokens)
    decode.alloc(3)  # so that pages lie elsewhere
    pages, found = decode.prefetch(tokens)
    assert pages == PAGES
    assert found.tolist() != index.tolist()
    assert equal(prefill, index, decode, found)
    assert not prefill.storage.store.counts
    assert not decode.storage.store.counts


def test_a_prompt_that_leaves_another_shares_its_beginning_alone(agents, servers):
    prefill, _ = servers
    tokens, index = tokens_of(6), prefill.alloc(6)
    fill(prefill, index, seed=8)
    prefill.back_up(tokens, index)
    pages, found = prefill.prefetch([*tokens[: 4 * PAGE], *tokens_of(2, start=9000)])
    assert pages == 4
    assert equal(prefill, index[: 4 * PAGE], prefill, found)


def test_a_prompt_that_goes_on_is_kept_with_what_was_before(agents, servers):
    prefill, _ = servers
    tokens, index = tokens_of(6), prefill.alloc(6)
    fill(prefill, index, seed=9)
    assert prefill.back_up(tokens[: 2 * PAGE], index[: 2 * PAGE]) == 2 * PAGE
    assert prefill.back_up(tokens[2 * PAGE :], index[2 * PAGE :], prefix=tokens[: 2 * PAGE]) == 4 * PAGE
    pages, found = prefill.prefetch(tokens)
    assert pages == 6
    assert equal(prefill, index, prefill, found)


def test_pages_are_kept_while_their_server_is_gone(agents, servers):
    prefill, _ = servers
    tokens, index = tokens_of(3), prefill.alloc(3)
    fill(prefill, index, seed=10)
    prefill.back_up(tokens, index)
    prefill.storage.close()
    again = serve(agents[0])
    try:
        assert again.storage.store.wait_connected(ANSWER_S)
        pages, found = again.prefetch(tokens)
        assert pages == 3
        assert equal(prefill, index, again, found)
    finally:
        again.storage.close()


@pytest.mark.parametrize(("changes", "words"), [
    ({"tp_size": 2}, "tensor parallel"),
    ({"layout": "page_first"}, "layer_first"),
    ({"extra_config": OURS}, "agent_socket"),
    ({"extra_config": OURS | {"agent_socket": "/nowhere"}}, "interface_v1"),
])  # fmt: skip
def test_what_cannot_be_served_is_refused_at_the_start(agents, changes, words):
    with pytest.raises(ValueError, match=words):
        serve(agents[0], **changes)


def test_pages_that_are_not_whole_are_neither_kept_nor_read(servers):
    storage, index = servers[0].storage, servers[0].alloc(1)
    for copy in (storage.batch_set_v1, storage.batch_get_v1):
        with pytest.raises(PagesInvalid, match="16 tokens"):
            copy(["ab" * 32], index[:-1])
    assert storage.batch_exists(["ab" * 32]) == 0


def test_a_pool_beside_that_of_attention_is_refused(servers):
    from sglang.srt.mem_cache.hicache_storage import PoolName

    servers[0].storage.register_mem_host_pool_v2(servers[0].pool, PoolName.KV)
    with pytest.raises(ValueError, match="mamba"):
        servers[0].storage.register_mem_host_pool_v2(servers[0].pool, PoolName.MAMBA)

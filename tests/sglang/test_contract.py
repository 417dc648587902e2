"""What of SGLang both backends stand on. A new version that changes it fails here, with the name of what changed."""

import inspect

import numpy as np
import pytest

from hybrid_cache.hashing.block_hash import block_hashes

pytest.importorskip("sglang")

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("default")]  # what its import warns of is not ours to mend

# Parameters as of 0.5.23 of every method that we override.
METHODS = {
    "register_mem_pool_host": ("self", "mem_pool_host"),
    "register_mem_host_pool_v2": ("self", "host_pool", "host_pool_name"),
    "batch_exists": ("self", "keys", "extra_info"),
    "batch_get_v1": ("self", "keys", "host_indices", "extra_info"),
    "batch_set_v1": ("self", "keys", "host_indices", "extra_info"),
    "exists": ("self", "key"),
    "get": ("self", "key", "target_location", "target_sizes"),
    "batch_get": ("self", "keys", "target_locations", "target_sizes"),
    "set": ("self", "key", "value", "target_location", "target_sizes"),
    "batch_set": ("self", "keys", "values", "target_locations", "target_sizes"),
    "clear": ("self",),
}


@pytest.fixture(scope="module")
def base():
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

    return HiCacheStorage


@pytest.mark.parametrize("name", METHODS)
def test_method_has_the_parameters_it_had(base, name):
    assert hasattr(base, name), f"HiCacheStorage.{name} is gone"
    found = tuple(inspect.signature(getattr(base, name)).parameters)
    assert found == METHODS[name], f"HiCacheStorage.{name} changed: {found}, it was {METHODS[name]}"


def test_nothing_that_it_wants_is_missing(base):
    from engine.sglang.storage import PrfaasStorage

    assert not PrfaasStorage.__abstractmethods__
    ours = {name for name in vars(PrfaasStorage) if not name.startswith("_")} - {"store", "close"}
    assert ours <= set(dir(base)), f"SGLang never calls {sorted(ours - set(dir(base)))}"


def test_its_release_is_the_one_that_was_tested():
    import sglang

    from engine.sglang.version import is_tested

    assert is_tested(sglang.__version__)


@pytest.mark.parametrize("salt", [None, "prfaas-0123"])
def test_names_of_pages_are_our_chain_from_another_root(salt):
    from sglang.srt.mem_cache.utils import get_hash_str, storage_namespace_seed

    tokens = np.random.default_rng(0).integers(0, 128_000, 96).tolist()
    seed = storage_namespace_seed(None, salt)
    pages = get_hash_str(tokens, seed, page_size=16)
    if seed is None:  # a chain of ours always has a root: SGLang's continues its own first page
        first = bytes.fromhex(pages[0])
        assert [name.hex() for name in block_hashes(tokens[16:], 16, b"", parent=first)] == pages[1:]
    else:
        assert [name.hex() for name in block_hashes(tokens, 16, b"", parent=bytes.fromhex(seed))] == pages


def test_settings_that_are_left_out_of_the_identity_are_there():
    from sglang.srt.server_args import ServerArgs

    from engine.sglang.identity import HARMLESS

    assert set(ServerArgs.__struct_fields__) >= HARMLESS


def test_zero_copy_is_chosen_by_interface_v1():
    from sglang.srt.managers.cache_controller import HiCacheController

    assert 'extra_config.get("interface_v1"' in inspect.getsource(HiCacheController.attach_storage_backend)


# Of disaggregation: methods of SGLang's common backend that we override or call, with their parameters as of 0.5.23.
COMMON = {
    ("CommonKVManager", "__init__"): ("self", "args", "disaggregation_mode", "server_args", "is_mla_backend"),
    ("CommonKVManager", "update_status"): ("self", "bootstrap_room", "status"),
    ("CommonKVManager", "conclude_transfer"): ("self", "bootstrap_room", "status", "targets", "failure_reason"),
    ("CommonKVManager", "conclude_failure"): ("self", "bootstrap_room", "failure_reason", "targets"),
    ("CommonKVManager", "record_failure"): ("self", "bootstrap_room", "failure_reason"),
    ("CommonKVManager", "parse_kv_status_message"): ("self", "msg"),
    ("CommonKVReceiver", "send_metadata"): (
        "self", "kv_indices", "aux_index", "state_indices", "decode_prefix_len", "destination", "device_kv_indices",
    ),
    ("CommonKVReceiver", "poll"): ("self",),
    ("CommonKVReceiver", "clear"): ("self",),
    ("CommonKVReceiver", "ensure_abort_notified"): ("self", "force_arm"),
    ("CommonKVReceiver", "_register_kv_args"): ("self",),
    ("CommonKVReceiver", "_send_bootstrap_message"): ("self", "bootstrap_info", "message", "operation"),
    ("CommonKVSender", "abort"): ("self",),
    ("CommonKVSender", "clear"): ("self",),
}  # fmt: skip


@pytest.mark.parametrize(("owner", "name"), COMMON)
def test_common_backend_has_the_methods_it_had(owner, name):
    from sglang.srt.disaggregation.common import conn

    found = tuple(inspect.signature(getattr(getattr(conn, owner), name)).parameters)
    assert found == COMMON[owner, name], f"{owner}.{name} changed: {found}"


def test_chunks_are_handed_over_as_mooncakes_are():
    """SGLang's sender calls it, and no base class has it."""
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

    from engine.sglang.disaggregation.disaggregation import PrfaasKVManager

    theirs, ours = (
        list(inspect.signature(manager.add_transfer_request).parameters)
        for manager in (MooncakeKVManager, PrfaasKVManager)
    )
    assert theirs == ours

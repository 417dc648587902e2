"""Prefixes that come to a vLLM engine from elsewhere than its own cache: from its agent's SSD, and from another node."""

import contextlib
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import grpc
import pytest

from hybrid_cache.hashing.block_hash import block_hashes
from tests.vllm.cases import LLAMA, Case, build
from tests.vllm.harness import ANSWER_S, Answer, Engine, Node, Pair, make_pair, telling_prompt, until
from transport.control.proto import node_pb2 as pb

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.dimensions(start="tiers")]

TOKENS = 16
PROMPT_TOKENS = 600  # about 2 MB of KVCache
CACHE_BYTES = 8 << 20
_seeds = count(20_000)


@pytest.fixture(scope="module", params=[LLAMA], ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def pair(case: Case, reference: Engine, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Nodes whose pages hold little and whose disks hold much."""
    folder = tmp_path_factory.mktemp("tiers")
    disk = {"ssd_dir": str(folder / "ssd"), "ssd_bytes": 64 << 20, "always_from_disk": True}
    pair = make_pair(folder, case.options(build(case.arch, models)), cache_bytes=CACHE_BYTES, **disk)
    reference.wait_ready()
    yield pair
    pair.close()


def ask(pair: Pair, node: Node, prompt: Sequence[int]) -> Answer:
    """A request of the node's own, and vLLM's cache as if it had never been."""
    answer = node.engine.submit(pair.name(), prompt, TOKENS, pair.local_params).result(ANSWER_S)
    pair.assert_idle()
    node.engine.forget_prefixes()
    return answer


def crowd_out(pair: Pair, node: Node) -> None:
    """Reserves all the memory of a node for a moment: what was there is on its disk afterwards."""
    layout, stub = pair.layout, node.agent.stub
    of_block = sum(layout.pages_per_block(group) for group in layout.full_groups)
    for blocks in range(node.agent.describe().pool.pages_total // of_block, 0, -1):
        request = pb.ReserveRequest(num_tokens=blocks * layout.block_size, prefix_only=True, ttl_s=20.0)
        with contextlib.suppress(grpc.RpcError):  # no room for that much
            ticket = stub.Reserve(request, timeout=10.0)
            stub.Abort(pb.AbortRequest(transfer_id=ticket.transfer_id), timeout=10.0)
            break
    until(lambda: not node.agent.describe().ssd.queued_bytes, "all is on the disk")
    pair.assert_idle()


def assert_same(answer: Answer, prompt: Sequence[int], reference: Engine) -> None:
    expected = reference.submit(f"x{next(_seeds)}", prompt, TOKENS).result(ANSWER_S).tokens
    assert answer.tokens == expected


def whole_blocks(pair: Pair, num_tokens: int) -> int:
    return num_tokens - num_tokens % pair.layout.block_size


def test_what_left_the_pages_comes_back_from_the_disk(pair: Pair, reference: Engine) -> None:
    node, prompt = pair.producer, telling_prompt(reference, PROMPT_TOKENS, _seeds)
    prefix = whole_blocks(pair, PROMPT_TOKENS - 1)
    assert ask(pair, node, prompt).cached_tokens == 0
    crowd_out(pair, node)
    for asked in (prompt, telling_prompt(reference, 100, _seeds, prompt)):
        answer = ask(pair, node, asked)
        assert answer.cached_tokens == prefix, node.agent.describe().ssd
        assert_same(answer, asked, reference)
    assert node.agent.describe().ssd.promotions["ok"] > 0


def test_the_disk_outlives_the_agent(pair: Pair, reference: Engine) -> None:
    node, prompt = pair.producer, telling_prompt(reference, PROMPT_TOKENS, _seeds)
    prefix = whole_blocks(pair, PROMPT_TOKENS - 1)
    ask(pair, node, prompt)
    crowd_out(pair, node)
    node.agent.kill()
    node.agent.start()
    pair.wait_ready()
    until(lambda: node.agent.describe().ssd.blocks > 0, "the disk was read")
    answer = ask(pair, node, prompt)
    assert answer.cached_tokens == prefix, node.agent.describe().ssd
    assert_same(answer, prompt, reference)


def test_a_prefix_that_was_moved_is_used_where_it_went(pair: Pair, reference: Engine) -> None:
    prompt = telling_prompt(reference, PROMPT_TOKENS, _seeds)
    prefix = whole_blocks(pair, PROMPT_TOKENS - 1)
    ask(pair, pair.producer, prompt)
    assert move(pair, pair.producer, pair.consumer, prompt[:prefix]) > 0
    pair.assert_idle()
    longer = telling_prompt(reference, 100, _seeds, prompt)
    answer = ask(pair, pair.consumer, longer)
    assert answer.cached_tokens == prefix
    assert_same(answer, longer, reference)


def move(pair: Pair, source: Node, target: Node, prefix: Sequence[int]) -> int:
    """As a gateway moves a prefix; returns how many bytes went."""
    hashes = b"".join(block_hashes(prefix, pair.layout.block_size, pair.salt))
    reserve = pb.ReserveRequest(block_hashes=hashes, num_tokens=len(prefix), prefix_only=True, ttl_s=20.0)
    ticket = target.agent.stub.Reserve(reserve, timeout=10.0)
    loaded = source.agent.stub.Load(pb.LoadRequest(block_hashes=hashes, ticket=ticket), timeout=10.0)
    assert target.agent.stub.Commit(pb.TransferRef(transfer_id=ticket.transfer_id), timeout=10.0).ok
    return loaded.bytes_sent

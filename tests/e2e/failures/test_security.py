"""AES-GCM and mutual TLS on the whole path; a peer with another identity is refused, told why and counted, and the
request goes on without him.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc.aio
import pytest

from prfaas.system.certificates import GATEWAY_NAME, clusterless, node_holder
from tests.conftest import Models
from tests.e2e.harness import Bench, topology_document
from transport.control.calls import CALLER
from transport.control.certificates import Authority
from transport.control.proto import node_pb2 as pb
from transport.control.proto import node_pb2_grpc as rpc
from transport.peers.name import PeerRole

pytestmark = pytest.mark.e2e

FILES = ("{name}.pem", "{name}.key")
PRIMED = 256
LEFT = (
    192  # tokens of a longer prompt that are not primed: another node has five times the work, however slow this one is
)


@pytest.fixture(scope="module")
def bench(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Everybody seals what he sends but `plain`, a second PrfaaS node, which has a certificate all the same."""
    model = models("kimi_linear")
    document = topology_document(model, threshold=300, chunk_tokens=128, transport="tcp", integrity="aead")
    east = document["clusters"][0]["nodes"]
    east.append(east[0] | {"node_id": "plain", "integrity": "checksum"})
    with Bench(document, model, tmp_path_factory.mktemp("security")) as running:
        yield running


def certificates(bench: Bench) -> Path:
    folder = bench.system.topology.certificates
    assert folder is not None
    return folder


def reissue(bench: Bench, name: str, authority: Authority | None = None) -> None:
    """A new certificate of the same name, on disk."""
    if name == GATEWAY_NAME:
        peer = clusterless(PeerRole.GATEWAY).peer
    else:
        config = bench.node(name).config
        peer = node_holder(config.cluster, config.cluster_kind, name).peer
    (authority or Authority(certificates(bench))).issue(name, peer=peer)


def make_stranger(bench: Bench, name: str, tmp_path: Path) -> None:
    """On disk, `name` has a certificate of the right name by an unknown authority."""
    reissue(bench, name, Authority(tmp_path, "stranger"))
    for file in FILES:
        (tmp_path / file.format(name=name)).replace(certificates(bench) / file.format(name=name))


async def refusals(bench: Bench, reason: str) -> float:
    return await bench.metric(
        bench.node("decode0").metrics_url, f'prfaas_landing_events_total{{event="refused:{reason}"}}'
    )


async def told(bench: Bench, name: str, reason: str) -> float:
    return await bench.metric(
        bench.node(name).metrics_url, f'prfaas_link_refusals_total{{link="west",reason="{reason}"}}'
    )


async def prefer(bench: Bench, name: str, length: int, seed: int) -> list[int]:
    """A prompt whose beginning is cached on `name`, so that its prefill goes there."""
    prompt = bench.prompt(length, seed)
    await bench.prime(name, prompt[: max(PRIMED, length - LEFT) + 1])
    return prompt


def test_a_node_with_a_strangers_certificate_is_not_sent_a_prompt_and_its_new_one_is_taken_up(
    bench: Bench, tmp_path: Path
) -> None:
    """First: nothing has been sent yet, so there is no connection from before."""

    async def scenario() -> None:
        prompt, name = await prefer(bench, "far", 900, seed=1), bench.name()
        make_stranger(bench, "far", tmp_path)
        done, record = await bench.generate(prompt, name=name), await bench.record(name)
        assert done.token_ids == bench.expected(prompt)
        assert record["fallbacks"][0] == "prefill_unreachable"
        ended = 'prfaas_engine_connections_ended_total{reason="handshake"}'
        assert await bench.metric(bench.node("far").metrics_url, ended) > 0
        assert "ended (handshake)" in bench.node("far").process.log_path.read_text()

        reissue(bench, "far")
        prompt, name = await prefer(bench, "far", 950, seed=2), bench.name()
        done, record = await bench.generate(prompt, name=name), await bench.record(name)
        assert done.token_ids == bench.expected(prompt)
        assert (record["prefill_node"], record["link"], record["fallbacks"]) == ("far", "tcp", [])

    bench.run(scenario())


@pytest.mark.parametrize("num_tokens", [2, 64, 301, 385, 1025])
def test_tokens_are_equal_over_a_sealed_path(bench: Bench, num_tokens: int) -> None:
    async def scenario() -> None:
        prompt = (
            await prefer(bench, "far", num_tokens, seed=10 + num_tokens)
            if num_tokens > 300
            else bench.prompt(num_tokens, 3)
        )
        name = bench.name()
        done, record = await bench.generate(prompt, name=name), await bench.record(name)
        assert done.token_ids == bench.expected(prompt)
        assert record["fallbacks"] == []
        assert (record["prefill_node"], record["link"]) == ("far" if num_tokens > 300 else "near", "tcp")

    bench.run(scenario())


def test_agents_do_not_listen_to_who_has_no_certificate(bench: Bench) -> None:
    async def scenario() -> None:
        async with grpc.aio.insecure_channel(bench.node("decode0").agent_address) as channel:
            stub = rpc.NodeAgentStub(channel)  # type: ignore[no-untyped-call]
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Describe(pb.DescribeRequest(), timeout=60.0)
            assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        host = bench.node("decode0").agent_address.rpartition(":")[0]
        reader, writer = await asyncio.open_connection(host, (await bench.describe("decode0")).calls_port)
        writer.write(CALLER)
        assert await reader.read() == b"", "neither over kept connections"
        writer.close()
        url = bench.node("decode0").metrics_url
        assert await bench.metric(url, 'prfaas_node_security{control="mtls",integrity="aead"}') == 1
        assert await bench.metric(url, "prfaas_certificate_expiry_timestamp_seconds") > 1.7e9

    bench.run(scenario())


def test_a_plain_sender_is_refused_with_a_reason_and_another_node_prefills(bench: Bench) -> None:
    async def scenario() -> None:
        prompt, name = await prefer(bench, "plain", 900, seed=4), bench.name()
        done, record = await bench.generate(prompt, name=name), await bench.record(name)
        assert done.token_ids == bench.expected(prompt)
        assert record["fallbacks"][0] == "prefill_integrity_mode"
        assert await refusals(bench, "integrity_mode") > 0
        assert await told(bench, "plain", "integrity_mode") > 0
        assert "this listener wants aes-128-gcm" in bench.node("plain").process.log_path.read_text()

    bench.run(scenario())


def test_without_another_prefill_node_the_decode_node_recomputes_and_strangers_are_not_used(
    bench: Bench, tmp_path: Path
) -> None:
    async def scenario() -> None:
        for node in ("far", "near"):
            await bench.kill(node)
        await bench.wait_until(lambda: _down(bench, "far", "near"))
        prompt, name = bench.prompt(700, seed=5), bench.name()
        done, record = await bench.generate(prompt, name=name), await bench.record(name)
        assert done.token_ids == bench.expected(prompt)
        assert record["fallbacks"] == ["prefill_integrity_mode", "recompute_no_prefill"]

        # A node with a certificate by an unknown authority: its gateway refuses it, and says so.
        make_stranger(bench, "far", tmp_path)
        line = 'prfaas_node_watch_failures_total{reason="identity"}'
        before = await bench.metric(bench.system.api_url, line)

        async def counted() -> bool:
            return await bench.metric(bench.system.api_url, line) > before

        await bench.start_again("far")
        await bench.wait_until(counted)
        assert await bench.gateway_sees("far") == "down"
        await bench.node("far").process.stop(30.0)
        reissue(bench, "far")
        await bench.restart("far", "near")

    bench.run(scenario(), 280.0)


async def _down(bench: Bench, *names: str) -> bool:
    return all([await bench.gateway_sees(name) == "down" for name in names])


def test_certificates_of_everybody_are_replaced_while_requests_run(bench: Bench) -> None:
    async def scenario() -> None:
        prompts = [bench.prompt(400 + 40 * i, seed=60 + i) for i in range(6)]
        running = [asyncio.create_task(bench.generate(prompt, 24)) for prompt in prompts]
        authority = Authority(certificates(bench))
        for name in (*bench.system.nodes, GATEWAY_NAME):
            reissue(bench, name, authority)
        for prompt, done in zip(prompts, await asyncio.gather(*running), strict=True):
            assert done.token_ids == bench.expected(prompt, 24)
        assert (await bench.describe("decode0")).node_id == "decode0"  # a new handshake, both ends with new files

    bench.run(scenario())

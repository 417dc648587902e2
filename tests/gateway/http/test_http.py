"""What surrounds a body on its way in: codings, shapes of errors, offers of other protocols, strangers' pages in a browser."""

import asyncio
import gzip
import json
import random
import re
import time
import zlib
from typing import Any

import pytest

from gateway.api.openai import Endpoint
from gateway.auth.keyring import digest_of
from gateway.config.gateway import GatewayConfig, NodeAddress
from gateway.errors import ApiError
from gateway.http.body import JOINED_AT_ONCE_BYTES, BodyPieces
from gateway.http.codings import CODINGS, coding_of, decoded
from gateway.http.connections import UPGRADE
from gateway.http.hosts import check_host
from tests.gateway.http.test_strangers import COMPLETION, HEAD, raw
from tests.gateway.memory.pipeline import on_memory_loop, pipeline
from tests.gateway.worlds import World, on_both_loops, on_loop, world
from transport.coding.codec import zstd_module
from transport.control.settings import SettingsError

LONG = json.dumps({"model": "scripted", "prompt": "hello there " * 2000}).encode()


def _raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


def _zstd(data: bytes) -> bytes:
    return bytes(pytest.importorskip("zstandard").ZstdCompressor().compress(data))


WRITERS = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "GZIP": gzip.compress,
    "deflate": zlib.compress,
    "Deflate": _raw_deflate,
    "zstd": _zstd,
    "identity": bytes,
}


@pytest.mark.parametrize("coding", WRITERS)
def test_a_body_comes_out_as_it_went_in(coding: str) -> None:
    written = WRITERS[coding](LONG)
    name = coding_of([coding])
    assert (written if not name else b"".join(decoded(name, written))) == LONG


def test_members_follow_each_other() -> None:
    assert b"".join(decoded("gzip", gzip.compress(b"a") + gzip.compress(b"b"))) == b"ab"
    if "zstd" in CODINGS:
        assert b"".join(decoded("zstd", _zstd(b"a") + _zstd(b"b"))) == b"ab"


@pytest.mark.parametrize("coding", CODINGS)
def test_what_is_cut_or_goes_on_is_refused(coding: str) -> None:
    written = WRITERS[coding](LONG)
    for bad in (written[:-1], written[: len(written) // 2], written + b"x", b"x", written[:5] + b"\xff" * 9):
        with pytest.raises(ValueError, match=r"\S"):
            b"".join(decoded(coding, bad))


@pytest.mark.parametrize("coding", [coding for coding in CODINGS if coding != "deflate"])
def test_a_body_has_a_bounded_number_of_members(coding: str) -> None:
    member = WRITERS[coding](b"a")
    assert b"".join(decoded(coding, member * 4096)) == b"a" * 4096
    with pytest.raises(ValueError, match="more than 4096 members"):
        list(decoded(coding, member * 4097))


@pytest.mark.parametrize("coding", CODINGS)
def test_a_bomb_comes_in_pieces(coding: str) -> None:
    first = next(piece for piece in decoded(coding, WRITERS[coding](bytes(1 << 26))) if piece)
    assert len(first) <= 1 << 24


@on_memory_loop
async def test_codings_that_nobody_undoes_are_named_by_those_that_are() -> None:
    async with pipeline() as w:
        for coding in ("br", "foo", "gzip, gzip", "nonsense"):
            for path in (Endpoint.COMPLETIONS, Endpoint.MESSAGES, "/tokenize"):
                headers = {"Content-Encoding": coding, "Content-Type": "application/json"}
                async with w.http.post(path, data=b"{}", headers=headers) as answer:
                    said = await answer.json()
                    assert (answer.status, answer.headers["Accept-Encoding"]) == (415, ", ".join(CODINGS))
                    assert said["error"]["code"] == "unsupported_coding"
                    assert ("type" in said) == (path == Endpoint.MESSAGES)
        assert 'reason="unsupported_coding",route="none",status="415"} 12.0' in await w.metrics()


@on_memory_loop
async def test_coded_bodies_are_read_and_bounded() -> None:
    async with pipeline(max_body_bytes=100_000) as w:
        for coding in ("gzip", "deflate", *(["zstd"] if zstd_module() else [])):
            headers = {"Content-Encoding": coding, "Content-Type": "application/json"}
            async with w.http.post(Endpoint.COMPLETIONS, data=WRITERS[coding](LONG), headers=headers) as answer:
                assert answer.status == 200
            bomb = WRITERS[coding](b" " * 10_000_000 + LONG)
            async with w.http.post(Endpoint.COMPLETIONS, data=bomb, headers=headers) as answer:
                assert answer.status == 413
            async with w.http.post(Endpoint.COMPLETIONS, data=b"not so", headers=headers) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (400, "invalid_body")
        await w.settled()


@on_memory_loop
async def test_a_transfer_coding_beside_chunks_is_not_known() -> None:
    async with pipeline() as w, raw(w) as client:
        chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(COMPLETION), COMPLETION)
        await client.say(HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + chunk)
        status, _, body = await client.answer()
        assert (status, json.loads(body)["error"]["code"]) == (501, "unknown_transfer_coding")
        await client.say(HEAD + b"Transfer-Encoding: Chunked\r\n\r\n" + chunk)
        assert (await client.answer())[0] == 200


@pytest.mark.parametrize("size", [0, 1, JOINED_AT_ONCE_BYTES, JOINED_AT_ONCE_BYTES + 1])
def test_a_long_body_is_put_together_while_the_event_loop_goes_on(size: int) -> None:
    data = random.Random(size).randbytes(size)

    @on_loop
    async def scenario() -> None:
        pieces = BodyPieces()
        for start in range(0, size, 60_000):
            pieces.append(data[start : start + 60_000])
        assert len(pieces) == size
        joining = asyncio.ensure_future(pieces.joined())
        await asyncio.sleep(0)
        assert joining.done() is (size <= JOINED_AT_ONCE_BYTES)
        assert await joining == data

    scenario()


def test_looking_for_an_offer_costs_a_body_little() -> None:
    body = b"x" * 256 * 1024  # what comes in one packet; the event loop waits meanwhile

    def cost_s(pattern: re.Pattern[bytes]) -> float:
        def once() -> float:
            start = time.thread_time()
            assert not list(pattern.finditer(body))
            return time.thread_time() - start

        return min(once() for _ in range(5))

    assert cost_s(UPGRADE) < 8 * cost_s(re.compile(rb"\r\nx"))


@on_both_loops
async def test_offers_of_another_protocol_and_bodies_are_told_apart() -> None:
    async with world() as w:
        for offer in (b"Upgrade: h2c", b"UPGRADE: websocket", b"upgrade:h2c"):
            await a_request_behind_an_offer_of_another_protocol_is_answered(w, offer)
        for cut in (None, 0, 10, 40):
            await a_body_is_none_of_a_heads_offers(w, cut)


async def a_request_behind_an_offer_of_another_protocol_is_answered(w: World, offer: bytes) -> None:
    length = b"Content-Length: %d\r\n" % len(COMPLETION)
    first = HEAD + length + b"Connection: Upgrade, HTTP2-Settings\r\n" + offer + b"\r\nHTTP2-Settings: AA\r\n\r\n"
    async with raw(w) as client:
        await client.say((first + COMPLETION) * 2 + HEAD + length + b"\r\n" + COMPLETION)
        assert [(await client.answer())[0] for _ in range(3)] == [200] * 3, offer


async def a_body_is_none_of_a_heads_offers(w: World, cut: int | None) -> None:
    """A gzip file may have a comment (RFC 1952 §2.3), which its checksum (of the header) is about."""
    header = b"\x1f\x8b\x08\x12\0\0\0\0\0\xff" + b"a comment\r\nUpgrade: none\0"
    body = header + (zlib.crc32(header) & 0xFFFF).to_bytes(2, "little") + gzip.compress(COMPLETION)[10:]
    coded = HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body)
    offered = HEAD + b"Content-Length: %d\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n" % len(COMPLETION) + COMPLETION
    told = coded + body + offered * 2
    at = len(told) if cut is None else len(coded) + cut
    async with raw(w) as client:
        await client.say(told[:at])
        await asyncio.sleep(0.05)
        await client.say(told[at:])
        assert [(await client.answer())[0] for _ in range(3)] == [200] * 3, cut


@on_memory_loop
async def test_errors_under_messages_are_anthropics() -> None:
    async with pipeline() as w:
        for method, path, headers, expected in (
            ("GET", "/v1/messages", {}, 405),
            ("PUT", "/v1/messages/count_tokens", {}, 405),
            ("POST", "/v1/messages", {"Expect": "fast"}, 417),
            ("POST", "/v1/messages/batches", {}, 404),
            ("POST", "/v1/messages?beta=true", {"Content-Type": "text/plain"}, 415),
            ("POST", "/v1/messages", {"Host": "evil.example"}, 403),
        ):
            headers = {"Content-Type": "application/json"} | headers
            async with w.http.request(method, path, data=b"{}", headers=headers) as answer:
                said = await answer.json()
                assert (answer.status, said["type"], bool(said["error"]["message"])) == (expected, "error", True)
        async with w.http.get("/v1/messagesx") as answer:
            assert (answer.status, set(await answer.json())) == (404, {"error"})


# Pages of strangers


@pytest.mark.parametrize(
    "host",
    [
        "",
        "127.0.0.1:8000",
        "[::1]:80",
        "localhost:80",
        "LOCALHOST",
        "gateway",
        "x.localhost.",
        "192.0.2.7",
        "Own.Example:1",
    ],
)
def test_names_that_no_stranger_can_have_lead_here(host: str) -> None:
    check_host(host, ("own.example",))


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:80", "localhost.evil.example", "own.example.x"]
)
def test_a_name_that_may_be_anybodys_is_refused(host: str) -> None:
    with pytest.raises(ApiError) as refused:
        check_host(host, ("own.example",))
    assert (refused.value.status, refused.value.code) == (403, "foreign_host")


@on_memory_loop
async def test_a_page_whose_name_leads_here_is_told_nothing() -> None:
    async with pipeline() as w:
        foreign = {"Host": "evil.example"}
        for path in ("/prfaas/requests", "/metrics", "/console", "/health", "/v1/models", "/v1/contexts", "/nothing"):
            async with w.http.get(path, headers=foreign) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (403, "foreign_host")
        for path in (Endpoint.COMPLETIONS, "/tokenize", "/prfaas/explain"):
            async with w.http.post(path, json={"model": "scripted", "prompt": "x"}, headers=foreign) as answer:
                assert answer.status == 403
        assert not await w.records()
        assert 'reason="foreign_host",route="none",status="403"} 10.0' in await w.metrics()


@on_memory_loop
async def test_the_name_is_nothing_where_keys_are_or_the_gateway_is_open() -> None:
    foreign = {"Host": "gateway.example"}
    for fields in ({"open": True}, {"hosts": ("gateway.example",)}):
        async with pipeline(**fields) as w, w.http.get("/v1/models", headers=foreign) as answer:
            assert answer.status == 200
    async with pipeline(open=True, hosts=("other.example",)) as w, w.http.get("/v1/models", headers=foreign) as answer:
        assert answer.status == 403


@on_memory_loop
async def test_a_page_of_another_origin_generates_nothing() -> None:
    async with pipeline() as w:
        origin = {"Origin": "https://evil.example"}
        for kind in ({}, {"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"}):
            for path in (Endpoint.COMPLETIONS, "/prfaas/explain", "/tokenize"):
                async with w.http.post(
                    path, data=COMPLETION, headers=origin | kind, skip_auto_headers=["Content-Type"]
                ) as answer:
                    assert answer.status == 415
        async with w.http.post(Endpoint.COMPLETIONS, json=json.loads(COMPLETION), headers=origin) as answer:
            assert answer.status == 200  # a browser asks first, and is not answered
            assert "Access-Control-Allow-Origin" not in answer.headers
        async with w.http.options(Endpoint.COMPLETIONS, headers=origin) as answer:
            assert answer.status == 405
        async with w.http.post(Endpoint.COMPLETIONS, data=COMPLETION, skip_auto_headers=["Content-Type"]) as answer:
            assert answer.status == 200


@pytest.mark.parametrize("name", ["Gateway.example", "gateway.example:8000", "http://gateway", ""])
def test_hosts_are_names(name: str, tmp_path: Any) -> None:
    with pytest.raises(SettingsError, match="hosts"):
        GatewayConfig(tokenizer_dir=tmp_path, nodes=(NodeAddress(agent="127.0.0.1:1"),), hosts=(name,))


@on_memory_loop
async def test_a_browser_at_any_name_is_asked_for_an_operators_key() -> None:
    async with pipeline(operator_keys=(digest_of("sk-operator"),)) as w:
        foreign = {"Host": "gateway.example"}
        for path, status in (("/console", 401), ("/metrics", 401), ("/v1/models", 403)):
            async with w.http.get(path, headers=foreign) as answer:
                assert answer.status == status


@on_memory_loop
async def test_no_answer_names_the_servers_software() -> None:
    async with pipeline() as w:
        found = [(await w.complete()).headers, (await w.complete(stream=True)).headers]
        found.append((await w.complete(stream="maybe")).headers)
        for method, path in (("GET", "/health"), ("GET", "/console"), ("GET", "/nothing"), ("PUT", "/v1/models")):
            async with w.http.request(method, path) as answer:
                found.append(answer.headers)
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
        reader, writer = await w.connect()
        writer.write(b"nonsense\r\n\r\n")
        assert b"server:" not in (await reader.read()).lower()
        writer.close()
    assert not any("Server" in headers for headers in found)


@on_memory_loop
async def test_pages_of_the_console_may_do_nothing_but_what_they_do() -> None:
    async with pipeline() as w:
        for path in ("/console", "/console/app.js", "/console/login.html", "/console/login.js"):
            async with w.http.get(path) as answer:
                policy = dict(
                    part.strip().split(" ", 1) for part in answer.headers["Content-Security-Policy"].split(";")
                )
                assert (policy["default-src"], policy["script-src"], policy["connect-src"]) == (
                    "'none'",
                    "'self'",
                    "'self'",
                )
                assert (policy["frame-ancestors"], policy["base-uri"]) == ("'none'", "'none'")
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                assert answer.headers["Referrer-Policy"] == "no-referrer"

"""Engines fetch only from domains that the gateway's file names: none, if it names none."""

from typing import Any

import pytest

from gateway.api.openai import Endpoint
from gateway.config.gateway import GatewayConfig
from gateway.errors import BadRequest
from gateway.prompt.media import KINDS
from gateway.prompt.media_addresses import check_addresses, check_all_addresses
from tests.gateway.prompt.test_media import IMAGE, chat, text
from tests.gateway.prompt.test_media_render import seeing
from tests.gateway.worlds import on_loop
from transport.control.settings import SettingsError, build

GOOD = [
    "https://a.test/b.png",
    "http://a.test:8080/b.png?at=x@y",
    "HTTPS://A.TEST/b.png",
    "data:image/png;base64,AA",
    "x",
]
BAD = [
    "https://b.test/a.png", "http://169.254.169.254/latest/meta-data", "http://127.0.0.1:8000/prfaas/links",
    "http://[::1]/", "https://a.test@b.test/", "https://b.test\\@a.test/", "https://sub.a.test/", "ftp://a.test/b",
    " http://a.test/", "http:/\t/b.test/", "http:b.test", "://a.test", "gopher://x",
]  # fmt: skip


def part(url: str, kind: str = "image_url") -> dict[str, Any]:
    return {"type": kind, kind: {"url": url}}


@pytest.mark.parametrize("kind", ["image_url", "audio_url", "video_url", "input_image"])
def test_only_named_domains_are_fetched_from(kind: str) -> None:
    for url in GOOD:
        for each in (part(url, kind), {"type": kind, kind: url}):
            check_addresses(each, KINDS, {"a.test"}, "here")
    for url in BAD:
        with pytest.raises(BadRequest, match=r"'here' is an address.*allowed_media_domains") as refusal:
            check_addresses(part(url, kind), KINDS, {"a.test"}, "here")
        assert refusal.value.code == "media_domain_not_allowed"


def test_an_address_is_found_wherever_it_lies_in_a_body() -> None:
    body = {"messages": [{"content": [{"type": "text", "text": "https://x"}, part("https://b.test/")]}]}
    check_all_addresses(body, KINDS, {"b.test"}, "")
    with pytest.raises(BadRequest) as refusal:
        check_all_addresses(body, KINDS, set(), "")
    assert refusal.value.param == "messages[0].content[1]"


def test_domains_are_names() -> None:
    table = {"tokenizer_dir": "t", "nodes": [{"agent": "127.0.0.1:7001"}]}
    for wrong in ("https://a.test", "A.test", "a.test/b", ""):
        with pytest.raises(SettingsError, match="allowed_media_domains"):
            build(GatewayConfig, {**table, "allowed_media_domains": [wrong]}, "[gateway]")


@on_loop
async def test_addresses_are_refused_by_default_on_every_path_and_images_in_requests_are_not() -> None:
    async with seeing() as w:
        messages = chat(text("look"), part("https://b.test/a.png"), max_tokens=4) | {"model": "scripted"}
        source = {"type": "url", "url": "https://b.test/a.png"}
        anthropic = [{"role": "user", "content": [{"type": "image", "source": source}]}]
        items = [{"role": "user", "content": [{"type": "input_image", "image_url": "https://b.test/a.png"}]}]
        for path, body in (
            (Endpoint.CHAT, messages),
            (Endpoint.MESSAGES, {"model": "scripted", "max_tokens": 4, "messages": anthropic}),
            (Endpoint.RESPONSES, {"model": "scripted", "input": items}),
            ("/v1/embeddings", messages),
        ):
            async with w.http.post(path, json=body) as answer:
                assert answer.status == 400, (path, await answer.text())
                assert "allowed_media_domains" in await answer.text(), path
        body = chat(text("look"), IMAGE, max_tokens=4) | {"model": "scripted"}
        async with w.http.post(Endpoint.CHAT, json=body) as answer:
            assert answer.status == 200
        await w.settled()

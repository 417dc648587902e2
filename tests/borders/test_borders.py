"""A listener on the way between two machines reads no word: neither between sites nor inside one."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.borders.capture import Capture, Flow
from tests.borders.network import Network, why_not
from tests.borders.secrets import Secrets
from tests.borders.sites import (
    ADDRESSES,
    API_PORT,
    AWAY,
    FIRST,
    GATEWAY,
    METRICS_PORT,
    NODES,
    SECOND,
    Sites,
    write_files,
    write_model,
)  # fmt: skip
from tests.borders.traffic import CLIENT_SALT, KILL_AFTER, LONG, SHORT, STREAMED, Traffic, prompt

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(bool(REASON := why_not()), reason=REASON or "none"),
]

NODE_PORTS: Final = (7001, 7101, 7201, 7301, 7401)
Said = Mapping[Flow, list[bytes]]
# What a listener on the WAN reads of a site in clear, and one inside it.
READ_BETWEEN: Final = {"protocol", "key", "prompt", "bulk", "salt", "ticket", "block", "KVCache"}
READ_INSIDE: Final = {"protocol", "key", "prompt", "bulk", "image", "answer", "salt", "tenant", "block"}
NO_IMAGES: Final = b"this model takes text parts only"  # says the gateway, once it has the whole request


@dataclass(slots=True)
class Heard:
    """What was said between sites, inside the one at home, and on the loopback of the machine away."""

    between: Said
    inside: Said
    loopback: Said
    secrets: Secrets


def hear(folder: Path, act: Callable[[Traffic], None], texts: list[str], *, plain: bool) -> Heard:
    """Two sites up, `act` done, all of it captured."""
    files = write_files(folder / "site", write_model(folder / "model"), plain=plain)
    with Network(ADDRESSES) as network, ExitStack() as listening:
        wires = listening.enter_context(Capture(network.switch))
        loopback = listening.enter_context(Capture(network.machines[AWAY], "lo"))
        with Sites(files, network) as sites:
            traffic = Traffic(sites)
            traffic.until_seen()
            act(traffic)
        listening.close()
        assert wires.dropped == loopback.dropped == 0, "not all was heard: the test proves nothing"
    said, beyond = wires.said(), loopback.said()
    away = ADDRESSES[AWAY]
    between = {flow: parts for flow, parts in said.items() if away in (flow.source, flow.target) or not flow.source}
    traffic.learn(between if plain else beyond, texts)
    inside = {flow: parts for flow, parts in said.items() if flow not in between}
    return Heard(between, inside, beyond, traffic.secrets)


def all_kinds(traffic: Traffic) -> None:
    """Everything that clients and operators do."""
    sites = traffic.sites
    gateway_file = str(sites.files.folder / "gateway.toml")
    traffic.chat("short", SHORT)
    assert "remote; node=remote-p0" in traffic.chat("long", LONG).headers["x-prfaas-route"]
    traffic.move(f"user: {prompt('long', LONG)}\nassistant: ")
    traffic.chat("salted", LONG, cache_salt=CLIENT_SALT)
    assert len(traffic.chat("several", LONG, n=3).texts) == 3
    traffic.stream("streamed", LONG)
    images_and_bulk(traffic)

    sites.prfaas("drain", "--node", SECOND, "-c", gateway_file)
    taken_over = traffic.stream(
        "taken over", LONG, STREAMED, lambda number: take_over(sites, gateway_file) if number == KILL_AFTER else None
    )
    assert taken_over == traffic.chat("taken over", LONG, STREAMED).texts[0]
    sites.start_again(FIRST)
    traffic.until_seen()

    sites.start_plan()
    sites.prfaas("convert", SECOND, "--to", "prefill", "-c", gateway_file)
    traffic.until_seen()
    traffic.chat("converted", SHORT)
    traffic.drain_link()
    sites.prfaas("check", "-c", gateway_file)
    assert "prfaas_plan_polls_total" in traffic.scrape(GATEWAY, API_PORT)
    for name in NODES:
        assert "prfaas_node_ready" in traffic.scrape(name, METRICS_PORT)
        assert not any(traffic.takes_old_tls(name, port) for port in NODE_PORTS)


def images_and_bulk(traffic: Traffic) -> None:
    """What is sent beside texts of one at a time."""
    answer = traffic.image("with an image")
    assert (answer.status, NO_IMAGES in answer.body) == (400, True), answer.body
    routes = [answer.headers["x-prfaas-route"] for answer in traffic.bulk()]
    assert any("remote; node=remote-p0" in route for route in routes), routes


def take_over(sites: Sites, gateway_file: str) -> None:
    """The only node that decodes is lost in the middle of a stream, and the drained one is there again."""
    sites.prfaas("drain", "--node", SECOND, "--undo", "-c", gateway_file)
    sites.kill(FIRST)


def the_least(traffic: Traffic) -> None:
    """What shows every kind of secret to a listener."""
    assert "remote; node=remote-p0" in traffic.chat("long", LONG).headers["x-prfaas-route"]
    traffic.move(f"user: {prompt('long', LONG)}\nassistant: ")
    images_and_bulk(traffic)
    traffic.scrape(AWAY, METRICS_PORT)


@pytest.mark.timeout(600)
def test_nothing_is_in_clear_between_the_machines_of_two_sites(tmp_path: Path) -> None:
    heard = hear(tmp_path, all_kinds, [prompt("long", LONG)], plain=False)
    assert heard.secrets.where(heard.between) == []
    assert heard.secrets.where(heard.inside) == []
    # It was there to be read: engines speak in clear on their machine's loopback.
    assert {"prompt", "bulk", "salt", "ticket"} <= set(heard.secrets.found(heard.loopback))
    assert {kind for kind, known in heard.secrets.by_kind.items() if known} >= READ_BETWEEN | READ_INSIDE
    assert len(heard.between) > 4
    assert len(heard.inside) > 4


@pytest.mark.timeout(300)
def test_a_site_that_is_plain_on_purpose_can_be_read(tmp_path: Path) -> None:
    """The same eyes see all of it where there is something to see."""
    heard = hear(tmp_path, the_least, [prompt("long", LONG)], plain=True)
    assert set(heard.secrets.found(heard.between)) >= READ_BETWEEN
    assert set(heard.secrets.found(heard.inside)) >= READ_INSIDE

"""HTTPS: every listener, TLS 1.2 and 1.3 only, certificates that change under it, and strangers that agree on nothing."""

import asyncio
import contextlib
import itertools
import logging
import re
import socket
import ssl
import struct
import threading
import warnings
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.auth.keyring import digest_of
from gateway.config.gateway import GatewayConfig, Strangers
from gateway.config.operators import OperatorConfig, OperatorRole
from gateway.errors import GatewayConfigError
from gateway.http.connections import ConnectionState, Gate
from gateway.http.tls import Handshaking, SecureConnection, ServerCertificate
from gateway.telemetry.metrics import Metrics
from gateway.workers.process_scope import SingleProcess
from gateway.workers.shared_counters import WorkerState
from prfaas.commands.asking import GatewayClient
from prfaas.errors import AskError
from prfaas.system.certificates import CertificateHolder, issue
from tests.gateway.worlds import World, on_both_loops, on_loop, until, world
from tests.transport.path.ports import free_port
from transport.control.asking import trusting
from transport.control.settings import SettingsError, build
from transport.path.handshakes import IN_ALL
from transport.peers.name import PeerName, PeerRole

ANN = OperatorConfig(name="ann", keys=(digest_of("sk-ann"),), role=OperatorRole.ADMIN)


def issued(folder: Path, *hosts: str) -> dict[str, Path]:
    """Files of a listener, signed by the authority of the folder."""
    issue(
        folder,
        [CertificateHolder(PeerName("prfaas", "any", PeerRole.GATEWAY, "api"), hosts or ("127.0.0.1",))],
        days=30,
    )
    return {"tls_certificate": folder / "api.pem", "tls_key": folder / "api.key"}


@contextlib.asynccontextmanager
async def client(folder: Path) -> AsyncIterator[aiohttp.ClientSession]:
    trust = trusting(folder / "authority.pem")
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust)) as session:
        yield session


@on_both_loops
async def test_every_listener_speaks_https_and_answers_as_without(tmp_path: Path) -> None:
    files = issued(tmp_path)
    async with world(metrics_port=free_port(), **files) as w, client(tmp_path) as http:
        assert w.gateway.url.startswith("https://127.0.0.1:")
        assert w.gateway.metrics_url.startswith("https://127.0.0.1:")
        body = {"model": "scripted", "prompt": "hello there", "max_tokens": 4}
        for stream in (False, True):
            async with http.post(f"{w.gateway.url}/v1/completions", json={**body, "stream": stream}) as answer:
                assert answer.status == 200
                assert await answer.read()
        big = {**body, "prompt": "the quick brown fox " * 20_000}
        async with http.post(f"{w.gateway.url}/v1/completions", json=big, expect100=True) as answer:
            assert answer.status in (200, 400)
        for path in ("/metrics", "/console", "/prfaas/requests"):
            async with http.get(w.gateway.metrics_url.removesuffix("/metrics") + path) as answer:
                assert answer.status == 200
                assert "Server" not in answer.headers
        await w.settled()


HSTS = "Strict-Transport-Security"
COMPLETION = {"model": "scripted", "prompt": "hello there", "max_tokens": 4}


async def shown(http: aiohttp.ClientSession, w: World) -> list[Mapping[str, str]]:
    """Headers of answers of every kind."""
    pages = w.gateway.metrics_url.removesuffix("/metrics")
    found = []
    for stream in (False, True):
        async with http.post(f"{w.gateway.url}/v1/completions", json={**COMPLETION, "stream": stream}) as answer:
            assert answer.status == 200
            await answer.read()
            found.append(answer.headers)
    asked = [f"{w.gateway.url}{path}" for path in ("/v1/models", "/nothing", "/v1/completions")]
    asked += [f"{pages}{path}" for path in ("/metrics", "/console", "/console/app.js", "/prfaas/requests")]
    for url in asked:
        async with http.get(url) as answer:
            found.append(answer.headers)
    assert all(each["X-Content-Type-Options"] == "nosniff" for each in found)
    for each in found[2:]:
        assert "frame-ancestors 'none'" in each["Content-Security-Policy"]
        assert "default-src 'none'" in each["Content-Security-Policy"]
        assert (each["X-Frame-Options"], each["Referrer-Policy"]) == ("DENY", "no-referrer")
    return found


@on_loop
async def test_browsers_are_told_over_https_alone_that_it_is_https_from_now_on(tmp_path: Path) -> None:
    files = issued(tmp_path)
    async with world(metrics_port=free_port(), **files) as w, client(tmp_path) as http:
        assert {each[HSTS] for each in await shown(http, w)} == {"max-age=31536000"}
        await w.settled()
    async with world(metrics_port=free_port()) as w, aiohttp.ClientSession() as http:
        assert not any(HSTS in each for each in await shown(http, w))
        await w.settled()
    async with world(strict_transport="", **files) as w, client(tmp_path) as http:
        assert not any(HSTS in each for each in await shown(http, w))
        await w.settled()


@pytest.mark.parametrize("policy", ["yes", "max-age=", "max-age=1\r\nX: y", "max-age=1; everywhere", "max-age=-1"])
def test_what_browsers_are_told_is_a_policy(policy: str) -> None:
    with pytest.raises(SettingsError, match="strict_transport"):
        config_of(strict_transport=policy)
    assert config_of(strict_transport="max-age=0; includeSubDomains").strict_transport


@on_both_loops
async def test_many_clients_at_once_agree_whenever_their_first_bytes_come(tmp_path: Path) -> None:
    async with world(**issued(tmp_path)) as w:

        async def ask() -> int:
            async with client(tmp_path) as http, http.get(f"{w.gateway.url}/livez") as answer:
                return answer.status

        assert await asyncio.gather(*(ask() for _ in range(40))) == [200] * 40
        await until(lambda: not w.gateway.listeners[0].handshaking)


def handshake(w: World, version: ssl.TLSVersion) -> tuple[str, str]:
    """The version and the cipher that a client of this version agrees on. Raises OSError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = context.maximum_version = version
    host, _, port = w.gateway.url.removeprefix("https://").partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as plain, context.wrap_socket(plain) as secure:
        cipher = secure.cipher()
        assert cipher is not None
        return str(secure.version()), cipher[0]


@on_loop
async def test_what_is_agreed_on_is_new_and_nothing_stays_of_it(tmp_path: Path) -> None:
    """Rules that leave a gateway as it was share one, up to its end."""
    files = issued(tmp_path, "127.0.0.1")
    async with world(**files) as w:
        await old_versions_and_weak_ciphers_are_not_taken(w)
        await a_certificate_that_changes_is_taken_up_and_a_wrong_one_is_not(w, tmp_path, files)
        # A gateway that ends leaves no handshake behind.
        reader, writer = await w.connect()
        await asyncio.sleep(0.1)
    assert await reader.read() == b""
    writer.close()


async def old_versions_and_weak_ciphers_are_not_taken(w: World) -> None:
    assert (await asyncio.to_thread(handshake, w, ssl.TLSVersion.TLSv1_3))[0] == "TLSv1.3"
    version, cipher = await asyncio.to_thread(handshake, w, ssl.TLSVersion.TLSv1_2)
    assert version == "TLSv1.2"
    assert cipher.startswith("ECDHE-")
    assert "GCM" in cipher or "CHACHA20" in cipher
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a version that is no longer taken
        with pytest.raises(ssl.SSLError):
            await asyncio.to_thread(handshake, w, ssl.TLSVersion.TLSv1_1)


@on_both_loops
async def test_strangers_that_agree_on_nothing_are_closed_and_counted(tmp_path: Path) -> None:
    strangers = Strangers(header_s=0.5)
    async with world(strangers=strangers, **issued(tmp_path)) as w, client(tmp_path) as http:
        host, _, port = w.gateway.url.removeprefix("https://").partition(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
        plain_reader, plain = await asyncio.open_connection(host, int(port))
        plain.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200" not in await plain_reader.read()
        for reader, _ in silent:
            assert await reader.read() == b""
        for writer in (plain, *(each for _, each in silent)):
            writer.close()
        async with http.get(f"{w.gateway.url}/metrics") as answer:
            page = await answer.text()
        assert 'prfaas_connections{listener="clients"} 1.0' in page
        counted = re.findall(r'_turned_away_total{listener="clients",reason="(?:tls|no_request)"} (\d+)', page)
        assert sum(map(int, counted)) == 4  # who said nothing is closed by the gate, or by the handshake's own end


class CountedSeat(SingleProcess):
    """Counts heartbeats that reach their end."""

    beats = 0

    def be(self, state: WorkerState) -> None:
        self.beats += 1


def reset(connection: socket.socket) -> None:
    """Closes with RST."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def unchecked() -> ssl.SSLContext:
    """Of a client that takes any certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def client_hello() -> bytes:
    said = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        unchecked().wrap_bio(ssl.MemoryBIO(), said).do_handshake()
    return said.read()


def reset_at_every_stage(address: tuple[str, int]) -> None:
    """Strangers that reset before their hello, in it, after it, and once they are secure."""
    hello = client_hello()
    for _ in range(10):
        for said in (b"", hello[:1], hello[: len(hello) // 2], hello):
            connection = socket.create_connection(address)
            connection.sendall(said)
            reset(connection)
        plain = socket.create_connection(address)
        with unchecked().wrap_socket(plain) as secure:
            reset(secure)


@on_both_loops
async def test_strangers_that_reset_leave_nothing_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seat, strangers = CountedSeat(), Strangers(header_s=1.0)
    async with world(seat=seat, strangers=strangers, **issued(tmp_path)) as w, client(tmp_path) as http:
        host, _, port = w.gateway.url.removeprefix("https://").partition(":")
        with socket.create_connection((host, int(port))) as one:
            reset(one)  # before the loop has accepted it
        await asyncio.to_thread(reset_at_every_stage, (host, int(port)))
        await until(lambda: not w.gateway.listeners[0].handshaking)
        await until(lambda: "TLS handshake" not in {each.get_name() for each in asyncio.all_tasks()})
        _, silent = await asyncio.open_connection(host, int(port))
        await asyncio.sleep(2 * strangers.header_s)  # the gate has looked at all that is left
        silent.close()
        beats = seat.beats
        await until(lambda: seat.beats > beats + 1)
        async with http.get(f"{w.gateway.url}/metrics") as answer:
            assert 'prfaas_connections{listener="clients"} 1.0' in await answer.text()
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR], caplog.text


def silent_from(source: str, address: tuple[str, int], count: int, held: contextlib.ExitStack) -> None:
    """Connections that say nothing."""
    for _ in range(count):
        connection = held.enter_context(socket.socket())
        connection.bind((source, 0))
        connection.connect(address)


@on_both_loops
async def test_strangers_that_say_nothing_have_few_places_and_clients_agree_all_the_same(tmp_path: Path) -> None:
    async with world(**issued(tmp_path)) as w, client(tmp_path) as http:
        host, _, port = w.gateway.url.removeprefix("https://").partition(":")
        handshaking = w.gateway.listeners[0].handshaking
        with contextlib.ExitStack() as held:
            await asyncio.to_thread(silent_from, "127.0.9.1", (host, int(port)), IN_ALL + 40, held)
            await until(lambda: len(handshaking) == IN_ALL)
            async with http.get(f"{w.gateway.url}/metrics") as answer:
                assert 'reason="handshakes"' in await answer.text()
        await until(lambda: not handshaking)


async def a_certificate_that_changes_is_taken_up_and_a_wrong_one_is_not(
    w: World, folder: Path, files: dict[str, Path]
) -> None:
    def serial() -> str:
        host, _, port = w.gateway.url.removeprefix("https://").partition(":")
        return ssl.get_server_certificate((host, int(port)))

    first = await asyncio.to_thread(serial)
    files["tls_certificate"].write_text("no certificate")
    await asyncio.sleep(2.5)
    assert await asyncio.to_thread(serial) == first
    issued(folder, "127.0.0.1", "localhost")
    while await asyncio.to_thread(serial) == first:  # noqa: ASYNC110 within the time of the test
        await asyncio.sleep(0.1)


def test_no_handshake_fails_while_files_change(tmp_path: Path) -> None:
    pairs, files = [issued(tmp_path / name) for name in ("one", "other")], issued(tmp_path)
    trusted = ssl.create_default_context()
    trusted.check_hostname, trusted.verify_mode = False, ssl.CERT_NONE
    certificate, is_over = ServerCertificate(*files.values()), threading.Event()

    def renew() -> None:
        for pair in itertools.cycle(pairs):
            if is_over.is_set():
                return
            for name, file in files.items():
                file.write_bytes(pair[name].read_bytes())
            certificate.refresh()

    renewing = threading.Thread(target=renew)
    renewing.start()
    try:
        for _ in range(300):
            there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
            asking = trusted.wrap_bio(back, there)
            answering = certificate.context.wrap_bio(there, back, server_side=True)
            for end in (asking, answering, asking, answering):
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
            assert asking.getpeercert(binary_form=True)
    finally:
        is_over.set()
        renewing.join()


def test_files_that_are_no_pair_are_named(tmp_path: Path) -> None:
    one, other = issued(tmp_path / "one"), issued(tmp_path / "other")
    with pytest.raises(
        GatewayConfigError, match=r"tls_certificate = .*api\.pem', tls_key: no certificate with its key"
    ):
        ServerCertificate(one["tls_certificate"], other["tls_key"])
    with pytest.raises(GatewayConfigError, match="No such file"):
        ServerCertificate(tmp_path / "gone", one["tls_key"])


def config_of(**values: Any) -> GatewayConfig:
    return build(GatewayConfig, {"tokenizer_dir": "t", "nodes": [{"agent": "127.0.0.1:7001"}], **values}, "[gateway]")


def test_a_gateway_in_clear_knows_it() -> None:
    tls = {"tls_certificate": "a.pem", "tls_key": "a.key"}
    for values, is_in_clear in (
        ({}, False),
        ({"host": "10.0.0.1", "open": True}, True),
        ({"host": "10.0.0.1", "open": True, "plain_api": True}, False),
        ({"host": "10.0.0.1", "open": True, **tls}, False),
    ):
        assert config_of(**values).is_in_clear == is_in_clear
    with pytest.raises(SettingsError, match="go together"):
        config_of(tls_certificate="a.pem")


@pytest.fixture
def other_authority(tmp_path: Path) -> Path:
    issued(tmp_path / "other")
    return tmp_path / "other" / "authority.pem"


def test_commands_ask_over_https_and_trust_the_file_alone(
    tmp_path: Path, other_authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRFAAS_OPERATOR_KEY", "sk-ann")

    @on_loop
    async def scenario() -> None:
        async with world(operators=(ANN,), **issued(tmp_path)) as w:

            def ask(authority: Path | None) -> Any:
                return GatewayClient(w.gateway.url, authority=authority).get("/prfaas/links")

            assert (await asyncio.to_thread(ask, tmp_path / "authority.pem"))["data"]
            assert (await asyncio.to_thread(ask, tmp_path / "api.pem"))["data"]  # the certificate itself will do
            for wrong in (None, other_authority):
                with pytest.raises(AskError, match="its certificate is not trusted"):
                    await asyncio.to_thread(ask, wrong)
            await until(lambda: True)

    scenario()
    with pytest.raises(AskError, match=r"--ca .*gone: No such file"):
        GatewayClient("https://127.0.0.1:1", authority=tmp_path / "gone")


class Shaking(SecureConnection):
    """A connection from an address, as far as `Handshaking` sees it."""

    def __init__(self, gate: Gate, handshaking: Handshaking, address: str) -> None:
        self.gate, self.state, self.address = gate, ConnectionState.NEW, address
        self._handshaking = handshaking
        handshaking.begun(self)

    def end(self) -> None:
        self._handshaking.over(self, is_secure=False)


@pytest.mark.parametrize("network", ["198.51.100.{}", "2001:db8::{}"])
def test_handshakes_of_before_keep_no_newcomer_from_its_own(network: str) -> None:
    gate = Gate("clients", 10_000, Strangers(), Metrics(), lambda: 0.0)
    handshaking = Handshaking(gate, lambda: 0.0)
    for number in range(8):
        handshaking.over(Shaking(gate, handshaking, network.format(number)), is_secure=True)
    for number in range(IN_ALL):
        Shaking(gate, handshaking, network.format(number % 8))
    honest = Shaking(gate, handshaking, "203.0.113.9")
    assert honest in list(handshaking)
    assert len(handshaking) <= IN_ALL
    for each in handshaking:
        each.end()
    assert not handshaking

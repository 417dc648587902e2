"""TLS at a picker's port: what proxies see of it, and what they must show."""

import asyncio
import re
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest

from gateway.errors import GatewayConfigError
from gateway.picker.certificates import FollowedCertificate, TlsFiles
from gateway.picker.main import config_from
from gateway.picker.service import HEALTH, SERVING, HealthService, grpc_listening
from prfaas.cli import parser
from transport.control.certificates import Authority
from transport.control.settings import SettingsError
from transport.wire.identity import Identity

HOST = "127.0.0.1"


class Site:
    """A picker's files, and how often they could not be used."""

    def __init__(self, folder: Path, *, asks_for_certificates: bool = False) -> None:
        self.folder = folder / "served"
        self.folder.mkdir()
        self.authority, self.strangers = Authority(folder / "ours"), Authority(folder / "theirs")
        self.serve(self.authority)
        self.files = TlsFiles(self.folder, self.authority.path if asks_for_certificates else None)
        self.failures = list[str]()

    def serve(self, authority: Authority) -> None:
        """The files are replaced, each by a rename."""
        issued = authority.issue("picker", [HOST])
        for source, name in ((issued.certificate, "tls.crt"), (issued.key, "tls.key")):
            shutil.copy(source, self.folder / "fresh")
            (self.folder / "fresh").replace(self.folder / name)

    def run(self, act: Callable[[int], Awaitable[None]]) -> None:
        """`act` with the port, while the picker serves."""

        async def scenario() -> None:
            credentials = FollowedCertificate(self.files, self.failures.append).credentials()
            health = HealthService(lambda: True)
            async with asyncio.timeout(30), grpc_listening(HOST, 0, None, health, credentials=credentials) as port:
                await act(port)

        asyncio.run(scenario())


async def served(port: int, trusted: Authority, shown: Identity | None = None) -> bool:
    """Whether a new connection is good to both ends."""
    pair = () if shown is None else (shown.key.read_bytes(), shown.certificate.read_bytes())
    credentials = grpc.ssl_channel_credentials(trusted.path.read_bytes(), *pair)
    options = [("grpc.use_local_subchannel_pool", 1)]  # else a connection of before may be used again
    async with grpc.aio.secure_channel(f"{HOST}:{port}", credentials, options) as channel:
        try:
            return bool(await channel.unary_unary(f"/{HEALTH}/Check")(b"", timeout=5.0) == SERVING)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False


def test_proxies_that_trust_the_authority_are_served_and_strangers_of_it_hang_up(tmp_path: Path) -> None:
    site = Site(tmp_path)

    async def act(port: int) -> None:
        assert await served(port, site.authority)
        assert not await served(port, site.strangers)
        async with grpc.aio.insecure_channel(f"{HOST}:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await channel.unary_unary(f"/{HEALTH}/Check")(b"", timeout=2.0)

    site.run(act)


def test_files_that_are_replaced_count_from_the_next_connection_on(tmp_path: Path) -> None:
    site = Site(tmp_path)

    async def act(port: int) -> None:
        assert await served(port, site.authority)
        site.serve(site.strangers)
        assert await served(port, site.strangers)
        assert not await served(port, site.authority)

    site.run(act)
    assert site.failures == []


def test_files_that_are_no_pair_change_nothing_and_are_counted_once(tmp_path: Path) -> None:
    site = Site(tmp_path)

    async def act(port: int) -> None:
        issued = site.strangers.issue("picker", [HOST])
        shutil.copy(issued.certificate, site.folder / "tls.crt")  # its key is not there yet
        assert await served(port, site.authority)
        assert await served(port, site.authority)
        assert site.failures == ["unusable"]
        shutil.copy(issued.key, site.folder / "tls.key")
        assert await served(port, site.strangers)

    site.run(act)
    assert site.failures == ["unusable"]


def test_files_that_are_gone_change_nothing(tmp_path: Path) -> None:
    site = Site(tmp_path)

    async def act(port: int) -> None:
        (site.folder / "tls.key").unlink()
        assert await served(port, site.authority)

    site.run(act)
    assert site.failures == ["unreadable"]


def test_with_an_authority_of_proxies_others_are_refused(tmp_path: Path) -> None:
    site = Site(tmp_path, asks_for_certificates=True)

    async def act(port: int) -> None:
        assert await served(port, site.authority, site.authority.issue("envoy"))
        assert not await served(port, site.authority, site.strangers.issue("envoy"))
        assert not await served(port, site.authority)

    site.run(act)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("tls.crt", b"", "tls.crt"),
        ("tls.key", b"no key", "tls.key"),
        ("tls.crt", b"-" * (1 << 20) + b"-", "at most 1048576 bytes"),
    ],
)
def test_files_that_are_wrong_at_the_start_are_named(tmp_path: Path, name: str, content: bytes, told: str) -> None:
    site = Site(tmp_path)
    (site.folder / name).write_bytes(content)
    with pytest.raises(GatewayConfigError, match=re.escape(told)):
        FollowedCertificate(site.files, site.failures.append)


def test_an_authority_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with pytest.raises(GatewayConfigError, match=r"none\.pem"):
        FollowedCertificate(TlsFiles(site.folder, tmp_path / "none.pem"), site.failures.append)


def test_flags_name_the_files() -> None:
    asked = ["epp", "--endpoints", "servers.json", "--cert-path", "/tls", "--client-ca", "/ca.pem"]
    assert config_from(parser().parse_args(asked)).tls == TlsFiles(Path("/tls"), Path("/ca.pem"))
    assert config_from(parser().parse_args(asked[:3])).tls is None
    with pytest.raises(SettingsError, match="--client-ca needs --cert-path"):
        config_from(parser().parse_args([*asked[:3], *asked[5:]]))

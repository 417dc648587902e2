"""A page's server is known by its certificate, as it is now, and asks its readers for none."""

import asyncio
import ssl
from pathlib import Path

from tests.gateway.worlds import on_both_loops
from transport.control.certificates import Authority
from transport.peers.name import of_der, of_pem


async def shown(port: int, trust: ssl.SSLContext) -> int:
    """The serial number of what the server at `port` shows to a reader without a certificate."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
    der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    assert await reader.read() == b"page"
    writer.close()
    return of_der(der).serial


def test_a_page_is_shown_with_the_certificate_that_the_files_have_now(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    identity = authority.issue("node", ["127.0.0.1"])
    trust = ssl.create_default_context(cafile=str(identity.authority))

    async def page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"page")
        writer.close()

    @on_both_loops
    async def scenario() -> None:
        server = await asyncio.start_server(page, "127.0.0.1", 0, ssl=identity.page_context())
        async with server:
            port = server.sockets[0].getsockname()[1]
            before = await shown(port, trust)
            assert await shown(port, trust) == before
            authority.issue("node", ["127.0.0.1"])
            assert await shown(port, trust) != before
            fresh = identity.key.read_bytes()
            identity.key.unlink()  # as while files are replaced
            during = await shown(port, trust)
            assert during != before
            identity.key.write_bytes(fresh)
            old = ssl.create_default_context(cafile=str(identity.authority))
            old.maximum_version = ssl.TLSVersion.TLSv1_2
            try:
                await shown(port, old)
            except OSError:
                return
            raise AssertionError("TLS 1.2 was taken")

    scenario()


def test_files_that_are_being_replaced_when_the_first_reader_comes_do_no_harm(tmp_path: Path) -> None:
    identity = Authority(tmp_path).issue("node", ["127.0.0.1"])
    trust = ssl.create_default_context(cafile=str(identity.authority))

    async def page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"page")
        writer.close()

    @on_both_loops
    async def scenario() -> None:
        key = identity.key.read_bytes()
        context = identity.page_context()
        identity.key.unlink()
        try:
            async with await asyncio.start_server(page, "127.0.0.1", 0, ssl=context) as server:
                port = server.sockets[0].getsockname()[1]
                assert await shown(port, trust) == of_pem(identity.certificate.read_bytes()).serial
        finally:
            identity.key.write_bytes(key)

    scenario()

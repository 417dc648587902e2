"""What a server does with callers that it knows from before."""

import ssl
from dataclasses import replace
from pathlib import Path

import pytest

from tests.peers import HOST
from transport.control.certificates import Authority


def shaken(
    server: ssl.SSLContext, client: ssl.SSLContext, session: ssl.SSLSession | None = None
) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Both ends after a handshake in memory, and a byte of the server's. Raises SSLError."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(back, there, session=session), server.wrap_bio(there, back, server_side=True)
    for end in ends * 3:
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
    ends[1].write(b"x")
    ends[0].read(1)  # with tickets, if there are any
    return ends


def test_nobody_resumes_under_an_authority_that_was_removed(tmp_path: Path) -> None:
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    both = tmp_path / "authority.pem"
    both.write_bytes(old.path.read_bytes() + new.path.read_bytes())
    server = replace(new.issue("server", [HOST]), authority=both).mutual_context()
    client = replace(old.issue("client", [HOST]), authority=both).client_context()
    session = shaken(server, client)[0].session
    both.write_bytes(new.path.read_bytes())
    with pytest.raises(ssl.SSLError):
        shaken(server, client, session)

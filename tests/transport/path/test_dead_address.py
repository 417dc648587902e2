import socket

from tests.transport.helpers import PATIENCE_S
from transport.path.tcp import format_address
from transport.send.client import ClientOptions, TransferClient
from transport.send.spec import TransferSpec


def test_a_push_to_nobody_fails_in_time_however_often_it_dials() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = format_address(*listener.getsockname()[:2])
    with TransferClient(options=ClientOptions(connections=2, peer_timeout_s=1.0)) as client:
        push = client.open(TransferSpec(address, "t", b"s" * 32, [4]), [[memoryview(b"abcd")]])
        push.ready_all()
        result = push.wait(PATIENCE_S)
    assert result is not None
    assert (result.ok, result.reason) == (False, "peer_lost")
    assert result.seconds < PATIENCE_S / 2

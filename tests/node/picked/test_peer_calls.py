"""Connections to nodes that prefill."""

import socket

from node.picked.peer_calls import probed_socket


def test_a_machine_that_is_gone_is_found_out() -> None:
    with probed_socket((socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", 1))) as connection:
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60
        assert not connection.getblocking()

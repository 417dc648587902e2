"""Real processes: what dies, dies hard. TRANSPORT_TRANSFERS sets how many transfers the last test makes."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

import numpy as np
import pytest

from tests.transport.helpers import PATIENCE_S, SECRET, Memory, deliver, wait_for
from tests.transport.proxy import Proxy
from transport.path.tcp import TcpOptions, parse_address
from transport.receive.options import ServerOptions
from transport.receive.server import TransferServer
from transport.send.client import ClientOptions, TransferClient
from transport.send.spec import TransferSpec
from transport.wire.connection import Connection, ConnectionRole

pytestmark = [pytest.mark.long, pytest.mark.turns]

MB = 1 << 20
SIZES = [MB] * 24
CUT_AFTER_BYTES = 20_000

SENDER = """
import sys, time
from tests.transport.helpers import SECRET, Memory
from transport.send.client import ClientOptions, TransferClient
from transport.send.spec import TransferSpec
sizes = [1 << 20] * 24
client = TransferClient(options=ClientOptions(connections=3, egress_bytes_per_s=20e6, peer_timeout_s=60.0))
push = client.open(TransferSpec(sys.argv[1], "t", SECRET, sizes), Memory(sizes, fill=True, seed=1))
push.ready_all()
push.wait()
"""

RECEIVER = """
import sys, time
from tests.transport.helpers import SECRET, Memory
from transport.receive.server import TransferServer
sizes = [1 << 20] * 24
server = TransferServer("127.0.0.1", int(sys.argv[1])).start()
server.expect("t", SECRET, sizes, Memory(sizes))
print(server.address, flush=True)
time.sleep(600)
"""


@contextmanager
def process(code: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen([sys.executable, "-c", code, *args], stdout=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.send_signal(signal.SIGCONT)
        child.kill()
        child.communicate()


def test_a_killed_sender_is_replaced_and_only_the_rest_is_sent() -> None:
    target, done = Memory(SIZES, seed=2), threading.Event()
    with TransferServer() as server, Proxy(server.address, passes=14 * MB) as proxy:
        landing = server.expect("t", SECRET, SIZES, target, on_done=lambda _: done.set())
        with process(SENDER, proxy.address) as sender:
            wait_for(lambda: landing.bytes_landed > 6 * MB)
            os.kill(sender.pid, signal.SIGKILL)
        source = Memory(SIZES, fill=True, seed=1)
        with TransferClient() as client:
            push = client.open(TransferSpec(server.address, "t", SECRET, SIZES), source)
            push.ready_all()
            result = push.wait(PATIENCE_S)
            assert result is not None
            assert result.ok
            assert result.stats.bytes_resumed >= 6 * MB
        assert done.wait(PATIENCE_S)
        assert source.content() == target.content()


def test_a_killed_sender_that_nobody_replaces_is_noticed() -> None:
    results: list[str] = []
    with TransferServer() as server, Proxy(server.address, passes=8 * MB) as proxy:
        landing = server.expect(
            "t", SECRET, SIZES, Memory(SIZES), on_done=lambda r: results.append(r.reason), orphan_timeout_s=0.2
        )
        with process(SENDER, proxy.address) as sender:
            wait_for(lambda: landing.bytes_landed > 2 * MB)
            os.kill(sender.pid, signal.SIGKILL)
            wait_for(lambda: results)
    assert results == ["sender_lost"]


def test_a_killed_receiver_is_noticed_and_a_new_one_at_the_same_address_served() -> None:
    with process(RECEIVER, "0") as receiver:
        assert receiver.stdout is not None
        address = receiver.stdout.readline().strip()
        options = ClientOptions(connections=3, egress_bytes_per_s=5e6, peer_timeout_s=3.0)
        with TransferClient(options=options) as client:
            push = client.open(TransferSpec(address, "t", SECRET, SIZES), Memory(SIZES, fill=True))
            push.ready_all()
            wait_for(lambda: push.stats.bytes_acked > 4 * MB)
            os.kill(receiver.pid, signal.SIGKILL)
            result = push.wait(PATIENCE_S)
            assert result is not None
            assert result.reason == "peer_lost"
            with process(RECEIVER, address.rpartition(":")[2]) as again:
                assert again.stdout is not None
                assert again.stdout.readline().strip() == address
                client.set_egress_budget(None)
                push = client.open(TransferSpec(address, "t", SECRET, SIZES), Memory(SIZES, fill=True))
                push.ready_all()
                result = push.wait(PATIENCE_S)
                assert result is not None
                assert result.ok


def test_a_stopped_receiver_is_not_waited_for_for_ever() -> None:
    tcp = TcpOptions(dead_after_s=0.8)
    options = ClientOptions(connections=2, egress_bytes_per_s=5e6, peer_timeout_s=2.0, tcp=tcp)
    with process(RECEIVER, "0") as receiver, TransferClient(options=options) as client:
        assert receiver.stdout is not None
        push = client.open(
            TransferSpec(receiver.stdout.readline().strip(), "t", SECRET, SIZES), Memory(SIZES, fill=True)
        )
        push.ready_all()
        wait_for(lambda: push.stats.bytes_acked > 2 * MB)
        os.kill(receiver.pid, signal.SIGSTOP)
        result = push.wait(PATIENCE_S)
        assert result is not None
        assert result.reason == "peer_lost"


def test_one_connection_at_a_hundredth_of_the_speed_holds_nobody_up() -> None:
    with (
        TransferServer() as server,
        Proxy(server.address, bytes_per_s=80e6) as proxy,
        TransferClient(options=ClientOptions(connections=4, chunk_bytes=MB)) as client,
    ):
        proxy.slow[0] = 0.8e6
        delivery = deliver(server, client, [MB] * 32, address=proxy.address)
        pushed, _ = delivery.wait()
        assert pushed is not None
        assert pushed.ok
        # Striped over four connections, a quarter would have to pass through the slow one.
        assert proxy.forwarded[0] < 7 * MB
        assert delivery.equal


def test_half_open_connections_are_given_up_and_the_rest_goes_over_new_ones() -> None:
    """The far end is gone without a word: no FIN, no reset, nothing comes any more."""
    tcp = TcpOptions(dead_after_s=2.0)
    with (
        TransferServer(options=ServerOptions(tcp=tcp)) as server,
        Proxy(server.address, 30e6, passes=6 * MB) as proxy,
        TransferClient(options=ClientOptions(connections=3, peer_timeout_s=60.0, tcp=tcp)) as client,
    ):
        delivery = deliver(server, client, SIZES, address=proxy.address)
        proxy.wait_for(6 * MB)
        silent = set(range(len(proxy.pairs)))
        proxy.stalled |= silent
        proxy.passes = inf
        assert all(result is not None and result.ok for result in delivery.wait())
        assert delivery.equal
        assert len(proxy.pairs) > len(silent)
        wait_for(lambda: server.num_connections <= 3, 60)


def test_peers_that_connect_and_stop_speaking_are_dropped() -> None:
    hello = Connection(
        ConnectionRole.SENDER, integrity="xxh3", nonce=b"n" * 16, now=0.0, max_chunk_bytes=MB
    ).data_to_send()
    with TransferServer(options=ServerOptions(tcp=TcpOptions(dead_after_s=0.5))) as server:
        socks = [socket.create_connection(parse_address(server.address)) for _ in range(40)]
        try:
            for sock, words in zip(socks, (b"", hello[:7], hello, b"\x16\x03\x01") * 10, strict=True):
                sock.sendall(words)
            socks[0].shutdown(socket.SHUT_WR)
            wait_for(lambda: server.num_connections == 0, 60)
        finally:
            for sock in socks:
                sock.close()


CLOCK = """
import time
from itertools import count
_calls, _localtime = count(), time.localtime
def _wall():
    # Hours back, years ahead, before the epoch: another place at every look.
    return (1.7e9, 1.7e9 - 7200, 2.2e9, -1e9)[next(_calls) % 4]
time.time = _wall
time.time_ns = lambda: int(_wall() * 1e9)
time.localtime = lambda seconds=None: _localtime(_wall() if seconds is None else seconds)
time.gmtime = lambda seconds=None: _localtime(_wall() if seconds is None else seconds)
"""


def test_the_time_of_day_may_jump_at_either_end() -> None:
    from_midnight = "DailyBudget(((0.0, 40e6), (3600.0, 60e6), (43200.0, 50e6)))"
    sender = SENDER.replace("egress_bytes_per_s=20e6", f"egress_bytes_per_s={from_midnight}")
    sender = sender.replace("import sys, time", "import sys, time\nfrom transport.path.pacing import DailyBudget")
    sender += "print(push.wait().ok, flush=True)\n"
    with process(CLOCK + RECEIVER, "0") as receiver:
        assert receiver.stdout is not None
        address = receiver.stdout.readline().strip()
        with process(CLOCK + sender, address) as sending:
            assert sending.stdout is not None
            assert sending.stdout.readline().strip() == "True"


def test_a_sender_that_stood_still_goes_on() -> None:
    """A suspended machine: to it no time has passed, to its peer it was gone."""
    target, done = Memory(SIZES, seed=2), threading.Event()
    options = ServerOptions(tcp=TcpOptions(dead_after_s=3.0))
    with TransferServer(options=options) as server:
        landing = server.expect("t", SECRET, SIZES, target, on_done=lambda _: done.set())
        with process(SENDER.replace("egress_bytes_per_s=20e6", "egress_bytes_per_s=8e6"), server.address) as sender:
            wait_for(lambda: landing.bytes_landed > 4 * MB, 60)
            os.kill(sender.pid, signal.SIGSTOP)
            wait_for(lambda: server.num_connections == 0, 60)
            assert not done.is_set()
            os.kill(sender.pid, signal.SIGCONT)
            assert done.wait(PATIENCE_S)
        assert Memory(SIZES, fill=True, seed=1).content() == target.content()


def test_many_transfers_with_connections_dying_at_random() -> None:
    count, rng = int(os.environ.get("TRANSPORT_TRANSFERS", "100")), np.random.default_rng(5)
    sizes = [20_480, 300_000, 1]
    with (
        TransferServer(options=ServerOptions()) as server,
        Proxy(server.address) as proxy,
        TransferClient(options=ClientOptions(connections=3)) as client,
    ):
        stop = threading.Event()

        def kill() -> None:
            passed = 0
            while not stop.wait(0.03):
                # However busy the machine is, something gets through between two cuts.
                if proxy.pairs and proxy.total >= passed + CUT_AFTER_BYTES:
                    passed = proxy.total
                    proxy.cut(int(rng.integers(max(0, len(proxy.pairs) - 3), len(proxy.pairs))))

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            deliveries = []
            for i in range(count):
                deliveries.append(deliver(server, client, sizes, transfer_id=str(i), address=proxy.address))
                if i % 10 == 9:
                    assert all(result is not None and result.ok for d in deliveries[-10:] for result in d.wait())
        finally:
            stop.set()
            killer.join()
        assert all(d.equal for d in deliveries)
        assert server.counters["landed"] == count

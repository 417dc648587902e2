"""One end of transfers over soft-RoCE: in this process, or in one of its own that takes orders as lines of JSON."""

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from tests.transport.helpers import SECRET
from tests.transport.rdma.worlds import PinnedMemory
from transport.path.tcp import TcpOptions
from transport.rdma.verbs import RdmaOptions, open_devices
from transport.receive.options import ServerOptions
from transport.receive.registry.landing import LandingResult
from transport.receive.server import TransferServer
from transport.send.client import ClientOptions, Push, TransferClient
from transport.send.spec import TransferSpec, Via

# An emulated machine under load does not answer within the 67 ms that suit a NIC.
TIMEOUT_EXPONENT = 17
ANSWER_S = 300.0
PATIENT = TcpOptions(connect_timeout_s=60.0, dead_after_s=60.0)


class End:
    """A server and a client on some of the machine's NICs."""

    def __init__(self, devices: Sequence[str], *, direct: bool = False) -> None:
        options = RdmaOptions(devices=tuple(devices), timeout_exponent=TIMEOUT_EXPONENT, direct=direct)
        self.devices = open_devices(options)
        self.server = TransferServer(options=ServerOptions(rdma=self.devices, tcp=PATIENT)).start()
        self.client = TransferClient(options=ClientOptions(rdma=self.devices, tcp=PATIENT, peer_timeout_s=20.0))
        self.pushes: dict[str, Push] = {}
        self._sources: list[PinnedMemory] = []  # registered memory stays where it is
        self._targets: dict[str, PinnedMemory] = {}
        self._landed: dict[str, threading.Event] = {}
        self._results: dict[str, LandingResult] = {}

    def address(self) -> str:
        return self.server.address

    def expect(self, transfer_id: str, sizes: list[int], orphan_timeout_s: float) -> None:
        target = self._targets[transfer_id] = PinnedMemory(sizes, seed=2)
        self.devices.register(memoryview(target.buffer))
        landed = self._landed[transfer_id] = threading.Event()

        def on_done(result: LandingResult) -> None:
            self._results[transfer_id] = result
            landed.set()

        self.server.expect(transfer_id, SECRET, sizes, target, on_done=on_done, orphan_timeout_s=orphan_timeout_s)

    def landing(self, transfer_id: str) -> tuple[bool, str, str]:
        """(arrived, reason, digest of what lies there) once nothing writes there any more."""
        assert self._landed[transfer_id].wait(ANSWER_S)
        result = self._results[transfer_id]
        return result.ok, result.reason, digest(self._targets[transfer_id])

    def cancel(self, transfer_id: str) -> None:
        self.server.cancel(transfer_id, "no longer needed")

    def counters(self) -> dict[str, int]:
        return dict(self.server.counters)

    def push(self, address: str, transfer_id: str, sizes: list[int], secret: str = "", withheld: int = 0) -> str:
        """Sends ranges full of random bytes; returns their digest. With the last `withheld` ranges it never ends."""
        source = PinnedMemory(sizes, fill=True, seed=len(self.pushes))
        self._sources.append(source)
        push = self.client.open(
            TransferSpec(address, transfer_id, secret.encode() or SECRET, sizes, via=Via.RDMA), source.source
        )
        push.ready(range(len(sizes) - withheld))
        self.pushes[transfer_id] = push
        return digest(source)

    def carried(self, nic: str) -> int:
        """Bytes that rails of one of our NICs have carried."""
        return sum(rail.bytes_total for rail in self.client.rails() if rail.local == nic)

    def close(self) -> None:
        self.client.close()
        self.server.close()
        self.devices.close()


def digest(memory: PinnedMemory) -> str:
    return hashlib.sha256(b"".join(memory.content())).hexdigest()


class RemoteEnd:
    """An End in a process of its own."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.rdma_vm.ends", *devices],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, method: str, *arguments: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([method, arguments]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self._reap()

    def close(self) -> None:
        if self.process.poll() is None:
            self.ask("close")
        self._reap()

    def _reap(self) -> None:
        self.process.wait(ANSWER_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def main() -> None:
    end = End(sys.argv[1:])
    for line in sys.stdin:
        method, arguments = json.loads(line)
        print(json.dumps(getattr(end, method)(*arguments)), flush=True)
        if method == "close":
            return


if __name__ == "__main__":
    main()

"""The two ends of a transport benchmark, each a process of its own that is told what to do in JSON lines.

    receiver: prints its address, then {"expect": id, "ranges": n, "range_bytes": b} -> {"ok": true}
    sender:   {"push": id, "ranges": n, "range_bytes": b, ...} -> {"seconds": ..., ...}
              {"close": true} ends all connections, the next push starts cold
Both:         {"cpu": true} -> {"cpu_s": ...} since the last time
"""

import argparse
import json
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from transport.path.link import LinkState
from transport.path.tcp import TcpOptions
from transport.receive.options import ServerOptions
from transport.receive.server import TransferServer
from transport.send.client import ClientOptions, Push, TransferClient
from transport.send.spec import TransferSpec
from transport.wire.checksum import Integrity
from transport.wire.identity import Identity

SECRET = b"benchmark"
SAMPLE_S = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["receiver", "sender"])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--integrity", default=Integrity.NONE.value)
    parser.add_argument("--certificates", default="", help="folder with node.pem, node.key and authority.pem")
    parser.add_argument("--memory", type=int, default=1 << 30)
    parser.add_argument("--options", default="{}", help="fields of ClientOptions as JSON")
    parser.add_argument("--tcp", default="{}", help="fields of TcpOptions as JSON")
    args = parser.parse_args()
    end = ReceivingEnd(args) if args.role == "receiver" else SendingEnd(args)
    cpu_s = time.process_time()
    for line in sys.stdin:
        request = json.loads(line)
        if "cpu" in request:
            now = time.process_time()
            say({"cpu_s": now - cpu_s})
            cpu_s = now
        elif "digest" in request:
            say({"digest": zlib.crc32(end.memory)})
        else:
            say(end.do(request))
    end.close()


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def identity_in(folder: str) -> Identity | None:
    at = Path(folder)
    files = {"certificate": at / "node.pem", "key": at / "node.key", "authority": at / "authority.pem"}
    return Identity(**files) if folder else None


def memory_of(size: int, seed: int) -> memoryview:
    """From the same allocator as the peers' (numpy asks for huge pages), and touched once."""
    memory = np.full(size, seed, dtype=np.uint8)
    if seed:
        memory[:: 4096 + 1] = seed + 1
    return memory.data


class ReceivingEnd:
    def __init__(self, args: argparse.Namespace) -> None:
        self.memory = memory_of(args.memory, seed=0)
        options = ServerOptions(
            integrity=Integrity(args.integrity),
            identity=identity_in(args.certificates),
            tcp=TcpOptions(**json.loads(args.tcp)),
        )
        self._server = TransferServer(args.host, options=options).start()
        say({"address": self._server.address})

    def do(self, request: dict[str, Any]) -> dict[str, Any]:
        if "counters" in request:
            return dict(self._server.counters)
        size, base = request["range_bytes"], request.get("base", 0)
        sizes = [size] * request["ranges"]
        self._server.expect(
            request["expect"], SECRET, sizes, lambda i: [self.memory[base + i * size : base + (i + 1) * size]]
        )
        return {"ok": True}

    def close(self) -> None:
        self._server.close()


class SendingEnd:
    def __init__(self, args: argparse.Namespace) -> None:
        self.memory = memory_of(args.memory, seed=7)
        self._integrity = Integrity(args.integrity)
        self._identity = identity_in(args.certificates)
        self._options = json.loads(args.options)
        self._tcp = json.loads(args.tcp)
        self._client: TransferClient | None = None
        self._pushes: dict[str, Push] = {}
        say({"ready": True})

    def do(self, request: dict[str, Any]) -> dict[str, Any]:
        if "close" in request:
            self.close()
            return {"ok": True}
        if "progress" in request:
            return {name: push.stats.bytes_acked for name, push in self._pushes.items()}
        if "link" in request:
            return describe(self._connected().link(request["link"]))
        return self._push(request)

    def _connected(self) -> TransferClient:
        if self._client is None:
            tcp = TcpOptions(**self._tcp)
            options = ClientOptions(integrity=self._integrity, identity=self._identity, tcp=tcp, **self._options)
            self._client = TransferClient(options=options)
        return self._client

    def _push(self, request: dict[str, Any]) -> dict[str, Any]:
        client, size, n = self._connected(), request["range_bytes"], request["ranges"]
        base, address = request.get("base", 0), request["address"]
        before = client.link(address)
        started = time.monotonic()
        spec = TransferSpec(
            address,
            request["push"],
            SECRET,
            [size] * n,
            tenant=request.get("tenant", ""),
            weight=request.get("weight", 1.0),
        )
        push = client.open(spec, lambda i: [self.memory[base + i * size : base + (i + 1) * size]])
        self._pushes[request["push"]] = push
        compute_s = request.get("compute_s", 0.0)
        if compute_s:
            threading.Thread(target=_compute, args=(push, n, compute_s), daemon=True).start()
        else:
            push.ready_all()
        if request.get("background"):
            return {"ok": True}
        watch = LinkSampler(client, address)
        while (result := push.wait(SAMPLE_S)) is None:
            watch.sample()
        seconds = time.monotonic() - started
        watch.sample()
        after = client.link(address)
        return {
            "ok": result.ok,
            "reason": result.reason,
            "seconds": seconds,
            "bytes": size * n,
            "resent_chunk_bytes": result.stats.bytes_resent,
            "retransmitted_bytes": after.retransmitted_bytes_total - before.retransmitted_bytes_total,
            **watch.summary(),
        }

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = None
        self._pushes = {}


def _compute(push: Push, ranges: int, seconds: float) -> None:
    """A prefill: its layers become ready one after the other."""
    started = time.monotonic()
    for i in range(ranges):
        time.sleep(max(0.0, started + seconds * (i + 1) / ranges - time.monotonic()))
        push.ready(i)


def describe(state: LinkState) -> dict[str, Any]:
    return {
        "congestion_control": state.congestion_control,
        "connections": state.connections,
        "goodput_mbit": state.goodput_bytes_per_s * 8e-6,
        "available_mbit": state.available_bytes_per_s * 8e-6,
        "rtt_ms": state.rtt_s * 1e3,
        "min_rtt_ms": state.min_rtt_s * 1e3,
        "retransmit_ratio": state.retransmit_ratio,
        "congested": state.congested,
    }


class LinkSampler:
    """Samples the link state during one push."""

    def __init__(self, client: TransferClient, address: str) -> None:
        self._client = client
        self._address = address
        self._inflation: list[float] = []
        self._last = client.link(address)

    def sample(self) -> None:
        state = self._client.link(self._address)
        if state.connections:
            self._last = state
            self._inflation.append(state.rtt_inflation)

    def summary(self) -> dict[str, Any]:
        ordered = sorted(self._inflation) or [1.0]
        return {
            "congestion_control": self._last.congestion_control,
            "connections": self._last.connections,
            "rtt_inflation_p50": ordered[len(ordered) // 2],
            "rtt_inflation_max": ordered[-1],
        }


if __name__ == "__main__":
    main()

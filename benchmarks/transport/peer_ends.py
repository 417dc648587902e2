"""The two ends of a benchmark of a peer; run by the peers' own Python. Speaks as benchmarks.transport.ends does, as far as that
goes."""

import argparse
import ctypes
import json
import sys
import time
import zlib
from typing import Any

import numpy as np

POLL_S = 0.0005


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=["mooncake", "nixl"])
    parser.add_argument("role", choices=["receiver", "sender"])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--memory", type=int, default=1 << 30)
    args = parser.parse_args()
    memory = np.full(args.memory, 1 if args.role == "sender" else 2, dtype=np.uint8)
    if args.role == "sender":
        memory[:: 4096 + 1] = 7
    end = (Mooncake if args.peer == "mooncake" else Nixl)(args.role, args.host, memory)
    cpu_s = time.process_time()
    for line in sys.stdin:
        request = json.loads(line)
        if "cpu" in request:
            now = time.process_time()
            say({"cpu_s": now - cpu_s})
            cpu_s = now
        elif "digest" in request:
            say({"digest": zlib.crc32(memory)})
        elif "expect" in request:
            say({"ok": True})
        else:
            started = time.monotonic()
            end.push(request)
            say(
                {"ok": True, "seconds": time.monotonic() - started, "bytes": request["ranges"] * request["range_bytes"]}
            )


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


class Mooncake:
    def __init__(self, role: str, host: str, memory: Any) -> None:
        from mooncake.engine import TransferEngine  # only the peers' environment has it

        self._engine = TransferEngine()
        if self._engine.initialize(f"{host}:{17000 + hash(role) % 900}", "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("mooncake: initialize failed")
        self._at = memory.ctypes.data
        self._memory = memory
        if self._engine.register_memory(self._at, memory.nbytes):
            raise RuntimeError("mooncake: register_memory failed")
        say({"address": f"{host}:{self._engine.get_rpc_port()}", "base": self._at})

    def push(self, request: dict[str, Any]) -> None:
        """One write per block: a batch of one call reports the state of its first block only."""
        size, base = request["range_bytes"], request["remote_base"]
        waiting = [
            self._engine.transfer_submit_write(request["address"], self._at + i * size, base + i * size, size)
            for i in range(request["ranges"])
        ]
        while waiting:
            time.sleep(POLL_S)
            states = [(batch, self._engine.transfer_check_status(batch)) for batch in waiting]
            if any(state < 0 for _, state in states):
                raise RuntimeError("mooncake: a write failed")
            waiting = [batch for batch, state in states if state == 0]


class Nixl:
    def __init__(self, role: str, host: str, memory: Any) -> None:
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        self._agent = nixl_agent(role, nixl_agent_config(enable_prog_thread=True, backends=["UCX"]))
        self._at = memory.ctypes.data
        self._memory = memory
        self._agent.register_memory([(self._at, memory.nbytes, 0, "x")], "DRAM")
        self._peer: Any = None
        say({"address": self._agent.get_agent_metadata().hex(), "base": self._at})

    def push(self, request: dict[str, Any]) -> None:
        if self._peer is None:
            self._peer = self._agent.add_remote_agent(bytes.fromhex(request["address"]))
        size, base = request["range_bytes"], request["remote_base"]
        near = self._agent.get_xfer_descs([(self._at + i * size, size, 0) for i in range(request["ranges"])], "DRAM")
        far = self._agent.get_xfer_descs([(base + i * size, size, 0) for i in range(request["ranges"])], "DRAM")
        handle = self._agent.initialize_xfer("WRITE", near, far, self._peer)
        self._agent.transfer(handle)
        while (state := self._agent.check_xfer_state(handle)) != "DONE":
            if state == "ERR":
                raise RuntimeError("nixl: the transfer failed")
            time.sleep(POLL_S)
        self._agent.release_xfer_handle(handle)


if __name__ == "__main__":
    main()
    ctypes.CDLL(None)._exit(0)  # both engines' threads outlive their interpreter badly

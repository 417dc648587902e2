"""Memory of what a gateway remembers of requests, after a hundred thousand of them and after a million.

    python -m benchmarks.gateway.memory [--requests 1000000] [--conversations 10000]

No network and no nodes: what a request leaves behind is in the caches of prompts, the index, the records and the
metrics. The benchmark feeds the gateway's own with the next turns of conversations of some tenants. What connections
leave behind is not measured here.
"""

import argparse
import gc
import json
import os
import random
import time
from typing import Final

from benchmarks.gateway.agents import LAYOUT
from benchmarks.gateway.cost import WORDS
from gateway.api.openai import Endpoint
from gateway.cluster.served_model import ServedModel
from gateway.prompt.prompt import Hashing, Prompt, PromptMemory, PromptModel, read_call
from gateway.request.request import Request, RequestProgress, Timeline
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.record_ring import RecordRing
from hybrid_cache.cache.events import BlocksStored
from hybrid_cache.index.index import PrefixIndex
from planner.decisions.routing.offload import Reason, Route, Target
from prompts.chat.template import ChatTemplate
from prompts.fair_cache import FairCache
from prompts.tokens.tokenizer import TextTokenizer
from tests.prompts.builders import TEMPLATE, bpe, fixed_clock

TENANTS: Final = 50
MOST_TURNS: Final = 12  # then a conversation begins anew
TURN_WORDS: Final = 40
CACHE_BYTES: Final = 16 << 20  # so that it is full long before the first look
INDEX_BLOCKS: Final = 200_000


class Soak:
    """A gateway's memory, and the conversations that fill it."""

    def __init__(self, conversations: int) -> None:
        self._random = random.Random(1)
        template = ChatTemplate(TEMPLATE, {"bos_token": "<s>"}, fixed_clock)
        self._memory = PromptMemory(TextTokenizer(bpe(), template, cache=FairCache(CACHE_BYTES)))
        self._index = PrefixIndex(LAYOUT, max_blocks=INDEX_BLOCKS)
        self._metrics = Metrics()
        self._records = RecordRing(4096)
        hashing = Hashing(16, b"soak")
        self._model = PromptModel(names=("mock",), max_model_len=1 << 22, hashing=hashing)
        self._served = ServedModel("mock", "mock", LAYOUT, 1 << 22, hashing)
        self._turns: list[tuple[int, int]] = [(number, 1) for number in range(conversations)]  # seed and length of each

    def request(self, number: int) -> None:
        """The next turn of one of the conversations, read, looked up and put down as served."""
        at = self._random.randrange(len(self._turns))
        seed, turns = self._turns[at]
        call, prompt = read_call(Endpoint.CHAT, _body(seed, turns), self._model, self._memory, b"%d" % (at % TENANTS))
        node = f"node {at % 8}"
        self._index.match_all(prompt.hashes, prompt.transfer_tokens)
        self._index.apply(node, BlocksStored(0, tuple(prompt.hashes)))
        request = Request(
            f"req-{number}", f"leg-{number}", call, prompt, self._served, RequestProgress(Timeline(float(number)))
        )
        request.progress.route = _route(prompt, node)
        request.progress.timeline.last_token = number + 1.0
        self._records.add(request, 200)
        self._metrics.finished(request, 200)
        self._turns[at] = (seed, turns + 2) if turns < MOST_TURNS else (seed + len(self._turns), 1)


def _body(seed: int, turns: int) -> bytes:
    said = random.Random(seed)
    contents = [" ".join(said.choices(WORDS, k=TURN_WORDS)) for _ in range(turns)]
    messages = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return json.dumps({"model": "mock", "messages": messages, "max_tokens": 1}).encode()


def _route(prompt: Prompt, node: str) -> Route:
    return Route(
        target=Target.DECODE, reason=Reason.SHORT, decode_node=node, prefill_node=None,
        uncached_tokens=prompt.num_tokens, cached_tokens=0, threshold_tokens=0.0,
    )  # fmt: skip


def rss_bytes() -> int:
    """Of this process."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--conversations", type=int, default=10_000)
    args = parser.parse_args()
    soak, seen, began = Soak(args.conversations), {}, time.process_time()
    marks = {args.requests // 10 * part for part in range(1, 11)}
    for number in range(1, args.requests + 1):
        soak.request(number)
        if number in marks:
            seen[number] = rss_bytes()
            print(
                f"{number:>10} requests {seen[number] / 1e6:8.1f} MB {time.process_time() - began:7.0f} s CPU",
                flush=True,
            )
    print(json.dumps({"ratio": seen[args.requests] / seen[args.requests // 10], "load_average": os.getloadavg()}))


if __name__ == "__main__":
    main()

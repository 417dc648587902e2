"""A scheduler's side with a scripted agent: tests put in what the agent says, and read what it was asked."""

import json
import threading
from types import SimpleNamespace

import msgspec

from engine.vllm.scheduler_side.errands import Granted
from engine.vllm.scheduler_side.scheduler import SchedulerSide
from engine.vllm.scheduler_side.steps import ArenaRef
from tests.engine.vllm.builders import BLOCK, full, layout_of, pages_for, state, tables_for
from transport.control.messages import TicketInfo

N = 3 * BLOCK + 2  # tokens of a prompt
ARENA = ArenaRef("/arena", 256, 10, 1)
LAYOUT = layout_of(full("a", table=0), state("s", table=1))


class Agent:
    """Notes what it is asked; events are put in by the test."""

    def __init__(self) -> None:
        self.news = threading.Event()
        self.rank_socket = "ranks.sock"
        self.block_salts: tuple[bytes, ...] = ()
        self.events, self.asked, self.ended, self.last, self.completed = [], [], [], [], []
        self.loads, self.computed, self.insets = [], [], []

    def poll(self):
        events, self.events = self.events, []
        return events

    def begin(self, request_id, prompt, num_tokens, salt, ticket, hints, insets):
        self.asked.append(("begin", num_tokens, ticket))
        self.insets.append(insets)
        return len(self.asked)

    def claim(self, prompt, salt, transfer_id, timeout_s, insets):
        self.insets.append(insets)
        self.asked.append(("claim", transfer_id, timeout_s))
        return len(self.asked)

    def last_step(self, errand, unfilled, *, computed_tokens, so_far_s):
        self.last.append((errand, unfilled))
        self.computed.append((computed_tokens, so_far_s))

    def complete(self, errand):
        self.completed.append(errand)

    def end(self, errand, *, loaded=False, reason=""):
        self.ended.append((errand, loaded, reason))

    def report_load(self, *load):
        self.loads.append(load)


class Sampling(SimpleNamespace):
    def clone(self):
        return Sampling(**vars(self))


def medium(name, start=1, length=3, modality="image"):
    """What stands in a prompt beside its tokens, as vLLM has it."""
    return SimpleNamespace(modality=modality, identifier=name, mm_position=SimpleNamespace(offset=start, length=length))


class Request:
    """vLLM's request, as far as it is used."""

    def __init__(self, request_id="r", num_tokens=N, params=None, **fields):
        self.request_id = request_id
        self.prompt_token_ids = list(range(num_tokens))
        self._all_token_ids = list(range(num_tokens))
        self.num_prompt_tokens = num_tokens
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.max_tokens = 16
        self.next_decode_eligible_step = 0
        self.block_hashes = ["of all"]
        self.sampling_params = Sampling(_eos_token_id=2, stop_token_ids=[3], repetition_detection=None)
        self.kv_transfer_params = params
        self.prompt_embeds = self.lora_request = self.cache_salt = None
        self.skip_reading_prefix_cache = False
        self.mm_features = []
        for name, value in fields.items():
            setattr(self, name, value)

    @property
    def all_token_ids(self):
        return self._all_token_ids

    def update_block_hashes(self):
        self.block_hashes.append(f"of {len(self._all_token_ids)}")


def ticket() -> TicketInfo:
    return TicketInfo(
        transfer_id="t", secret=b"s", num_tokens=N - 1, have_tokens=0, tokens_digest=b"d", endpoints=(),
        ttl_s=1.0, layout_fingerprint="f", node_id="n", cluster="c",
    )  # fmt: skip


LEG = {"do_remote_decode": True, "ticket": json.loads(msgspec.json.encode(ticket())), "salt": "00"}
LANDING = {"do_remote_prefill": True, "transfer_id": "t", "salt": "00", "timeout_s": 5.0}


class World:
    def __init__(self, layout=LAYOUT, **options):
        self.now = 0.0
        self.layout = layout
        self.agent = Agent()
        self.offers, self.drafts = {}, {}
        self.side = SchedulerSide(layout, self.agent, lambda: self.now, **options)

    def arrive(self, request):
        self.side.on_new_request(request)
        return request

    def grant(self, num_tokens=N - 1, errand=1, cached=0):
        self.agent.events.append(Granted(errand, pages_for(LAYOUT, num_tokens, cached=cached), ARENA))

    def schedule(self, request, num_tokens):
        """A step that computes; vLLM advances afterwards."""
        step = self.side.build_step(
            {request.request_id: num_tokens},
            lambda _: tables_for(self.layout, request.num_computed_tokens + num_tokens),
            self.offers,
            self.drafts,
        )
        request.num_computed_tokens += num_tokens
        return step

    def idle(self):
        return self.side.build_step({}, lambda _: ())

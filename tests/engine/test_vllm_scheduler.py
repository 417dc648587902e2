"""The scheduler's side against a scripted agent: what vLLM is told, what the workers are told, what is given back."""

import json
import threading
from types import SimpleNamespace

import msgspec
import pytest

from engine.vllm_agent import Arrived, Failed, Granted, Written
from engine.vllm_scheduler import HELD_STEP, SchedulerSide
from engine.vllm_steps import ArenaRef
from tests.engine.vllm_builders import BLOCK, full, layout_of, pages_for, state, tables_for
from transport.messages import Delivered, TicketInfo

N = 3 * BLOCK + 2  # tokens of a prompt
ARENA = ArenaRef("/arena", 256, 10, 1)
LAYOUT = layout_of(full("a", table=0), state("s", table=1))


class Agent:
    """Notes what it is asked; events are put in by the test."""

    def __init__(self) -> None:
        self.news = threading.Event()
        self.rank_socket = "ranks.sock"
        self.events, self.asked, self.ended, self.last, self.completed = [], [], [], [], []
        self.loads, self.computed = [], []

    def poll(self):
        events, self.events = self.events, []
        return events

    def begin(self, request_id, prompt, num_tokens, salt, ticket):
        self.asked.append(("begin", num_tokens, ticket))
        return len(self.asked)

    def claim(self, prompt, salt, transfer_id, timeout_s):
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
        )
        request.num_computed_tokens += num_tokens
        return step

    def idle(self):
        return self.side.build_step({}, lambda _: ())


@pytest.fixture
def world():
    return World()


def test_a_leg_stops_one_token_short_and_hashes_what_is_left(world):
    request = world.arrive(Request(params=LEG))
    assert world.agent.asked == [("begin", N - 1, ticket())]
    assert request.prompt_token_ids == list(range(N - 1))
    assert request.num_prompt_tokens == len(request._all_token_ids) == N - 1
    assert request.block_hashes == [f"of {N - 1}"]
    assert request.sampling_params.stop_token_ids == []


def test_a_leg_waits_for_pages_is_saved_held_and_answers(world):
    request = world.arrive(Request(params=LEG))
    assert world.side.num_new_matched_tokens(request, 0) is None
    world.grant()
    assert world.side.num_new_matched_tokens(request, 0) == 0
    world.side.after_alloc(request, tables_for(LAYOUT, N - 1), 0)
    first = world.schedule(request, BLOCK)
    assert (first.saves[0].start, first.saves[0].stop, first.saves[0].states) == (0, BLOCK, ())
    assert first.grants
    assert request.next_decode_eligible_step == 0
    last = world.schedule(request, N - 1 - BLOCK)
    assert (last.saves[0].start, last.saves[0].stop, last.saves[0].states) == (BLOCK, N - 1, (N - 1,))
    assert not last.grants
    assert world.agent.last == [(1, [])]
    assert request.next_decode_eligible_step == HELD_STEP
    world.agent.events += [
        Written(1),
        Arrived(1, Delivered(job="j", ok=True, bytes_total=9, bytes_before_prefill_end=7)),
    ]
    world.idle()
    assert request.next_decode_eligible_step == 0
    answer = world.side.request_finished(request)
    assert answer["delivered"]
    assert (answer["num_tokens"], answer["bytes_total"], answer["bytes_before_prefill_end"]) == (N - 1, 9, 7)
    assert world.agent.ended == [(1, False, "")]
    counts = world.side.take_counts()
    assert (counts.legs, counts.overlapped_bytes) == ({"delivered": 1}, 7)


def test_a_leg_that_is_cached_completely_is_hardly_computed(world):
    request = world.arrive(Request(num_tokens=2 * BLOCK + 1, params=LEG))
    world.grant(2 * BLOCK, cached=2 * BLOCK)
    assert world.side.num_new_matched_tokens(request, 0) is None
    assert world.agent.completed == [1]
    assert request.num_prompt_tokens == 1
    assert world.side.num_new_matched_tokens(request, 0) is None, "held until it has been delivered"
    world.agent.events.append(Arrived(1, Delivered(job="j", ok=True)))
    assert world.side.num_new_matched_tokens(request, 0) == 0
    request.num_preemptions = 1
    assert world.side.num_new_matched_tokens(request, 0) == 0, "it was cut: there is no room for what was cached"
    assert world.side.request_finished(request)["cached_tokens"] == 2 * BLOCK


@pytest.mark.parametrize("reason", ["no_capacity", "layout_mismatch", "agent_gone"])
def test_a_refused_leg_computes_one_token_and_says_why(world, reason):
    request = world.arrive(Request(params=LEG))
    world.agent.events.append(Failed(1, reason))
    assert world.side.num_new_matched_tokens(request, BLOCK) is None, "vLLM's own hit is that of the whole prompt"
    assert (request.num_prompt_tokens, request.max_tokens) == (1, 1)
    assert world.side.num_new_matched_tokens(request, 0) == 0
    assert world.side.request_finished(request) == {"delivered": False, "reason": reason}
    assert world.side.take_counts().legs == {reason: 1}


def test_a_push_that_fails_ends_the_leg(world):
    request = world.arrive(Request(params=LEG))
    world.grant()
    world.side.num_new_matched_tokens(request, 0)
    world.side.after_alloc(request, tables_for(LAYOUT, N - 1), 0)
    world.schedule(request, N - 1)
    world.agent.events.append(Failed(1, "peer_lost"))
    world.idle()
    assert request.next_decode_eligible_step == 0
    assert request.max_tokens == 1
    assert world.agent.ended == [(1, False, "peer_lost")]
    assert world.side.request_finished(request) == {"delivered": False, "reason": "peer_lost"}


def test_a_landing_is_loaded_and_given_back(world):
    request = world.arrive(Request(params=LANDING))
    assert world.side.num_new_matched_tokens(request, 0) is None
    world.grant()
    assert world.side.num_new_matched_tokens(request, BLOCK) == N - 1 - BLOCK
    world.side.after_alloc(request, tables_for(LAYOUT, N - 1), N - 1 - BLOCK)
    step = world.idle()
    assert [(load.start, load.stop) for load in step.loads] == [(BLOCK, N - 1)]
    world.side.loads_ended({"r"}, set())
    assert world.agent.ended == [(1, True, "")]
    assert not world.idle().loads
    assert world.side.take_counts().landed_tokens == N - 1 - BLOCK


def test_a_landing_that_vllm_has_already_is_not_loaded(world):
    request = world.arrive(Request(num_tokens=2 * BLOCK + 1, params=LANDING))
    world.grant(2 * BLOCK)
    assert world.side.num_new_matched_tokens(request, 2 * BLOCK) == 0
    world.side.after_alloc(request, ((), ()), 0)
    assert world.agent.ended == [(1, True, "")]


def test_a_landing_that_fails_goes_on_as_local(world):
    request = world.arrive(Request(params=LANDING))
    world.agent.events.append(Failed(1, "landing_timeout"))
    assert world.side.num_new_matched_tokens(request, 0) is None
    assert world.agent.asked[1] == ("begin", 3 * BLOCK, None)
    assert world.side.take_counts().fallbacks == {"landing_timeout": 1}


def test_a_load_that_fails_is_recomputed_without_pages(world):
    request = world.arrive(Request(params=LANDING))
    world.grant()
    world.side.after_alloc(request, ((), ()), world.side.num_new_matched_tokens(request, 0))
    world.idle()
    world.side.loads_ended({"r"}, {"r"})
    assert world.agent.ended == [(1, False, "load_failed")]
    assert world.side.num_new_matched_tokens(request, 0) == 0
    assert world.side.take_counts().fallbacks == {"load_failed": 1}


def test_a_landing_that_was_recomputed_says_so(world):
    request = world.arrive(Request(params=LANDING))
    world.grant()
    world.side.after_alloc(request, ((), ()), world.side.num_new_matched_tokens(request, 0))
    world.side.loads_ended({"r"}, {"r"})
    assert world.side.request_finished(request) == {"recomputed": True, "reason": "load_failed"}
    late = world.arrive(Request("late", params=LANDING))
    world.agent.events.append(Failed(2, "landing_timeout"))
    assert world.side.num_new_matched_tokens(late, 0) is None
    assert world.side.request_finished(late) == {"recomputed": True, "reason": "landing_timeout"}


def test_a_cached_prefix_that_cannot_be_loaded_is_no_landing_that_failed(world):
    request = world.arrive(Request())
    assert world.side.num_new_matched_tokens(request, 0) is None
    world.grant(3 * BLOCK, cached=2 * BLOCK)
    world.side.after_alloc(request, ((), ()), world.side.num_new_matched_tokens(request, 0))
    world.side.loads_ended({"r"}, {"r"})
    assert world.side.request_finished(request) is None
    assert world.side.take_counts().fallbacks == {"load_failed": 1}


def test_a_leg_whose_pages_are_lost_while_it_loads_is_not_held(world):
    request = world.arrive(Request(params=LEG))
    world.grant(cached=2 * BLOCK)
    world.side.after_alloc(request, ((), ()), world.side.num_new_matched_tokens(request, 0))
    world.idle()
    world.agent.events.append(Failed(1, "agent_gone"))
    world.idle()
    world.side.loads_ended({"r"}, set())  # the ranks were through already
    request.num_computed_tokens = 2 * BLOCK
    assert not world.schedule(request, N - 1 - 2 * BLOCK).saves
    assert (request.next_decode_eligible_step, request.max_tokens) == (0, 1)
    assert world.side.request_finished(request) == {"delivered": False, "reason": "agent_gone"}


def test_a_leg_whose_push_failed_while_it_loaded_in_vain_is_hardly_computed(world):
    request = world.arrive(Request(params=LEG))
    world.grant(cached=2 * BLOCK)
    world.side.after_alloc(request, ((), ()), world.side.num_new_matched_tokens(request, 0))
    world.idle()
    world.agent.events.append(Failed(1, "peer_lost"))
    world.idle()
    world.side.loads_ended({"r"}, {"r"})
    assert (request.num_prompt_tokens, request.max_tokens) == (1, 1)


def test_an_abort_while_loading_gives_back_when_the_load_has_ended(world):
    request = world.arrive(Request(params=LANDING))
    world.grant()
    world.side.after_alloc(request, ((), ()), world.side.num_new_matched_tokens(request, 0))
    world.idle()
    assert world.side.request_finished(request) is None
    assert world.agent.ended == []
    world.side.loads_ended({"r"}, set())
    assert world.agent.ended == [(1, False, "aborted")]


def test_a_leg_aborted_while_loading_is_counted(world):
    request = world.arrive(Request(params=LEG))
    world.grant(cached=2 * BLOCK)
    world.side.after_alloc(request, ((), ()), world.side.num_new_matched_tokens(request, 0))
    world.idle()
    world.side.request_finished(request)
    world.side.loads_ended({"r"}, set())
    assert world.side.take_counts().legs == {"aborted": 1}


def test_an_agent_that_says_nothing_is_not_waited_for(world):
    request = world.arrive(Request())
    assert world.side.num_new_matched_tokens(request, 0) is None
    world.now = 5.0
    assert world.side.num_new_matched_tokens(request, 0) is None
    assert world.side.num_new_matched_tokens(request, 0) == 0
    assert world.side.take_counts().fallbacks == {"timeout": 1}


class Inbox:
    """What vLLM has been sent, as often as it is looked at."""

    def __init__(self, *looks: bool) -> None:
        self.looks = list(looks)

    def __call__(self) -> bool:
        return self.looks.pop(0)


def test_while_every_request_waits_vllm_is_left_alone_until_it_is_sent_something():
    inbox = Inbox(False, False, True)
    world = World(has_input=inbox)
    request = world.arrive(Request(params=LANDING))
    assert world.side.num_new_matched_tokens(request, 0) is None
    assert inbox.looks == []
    assert world.agent.loads == [(0, 1, N)], "what waits is reported before the rest, which may be long"
    world.idle()  # once a step
    world.agent.news.set()
    world.grant()
    assert world.side.num_new_matched_tokens(request, 0) == N - 1, "news end a rest, and are heard in the same step"


def test_a_leg_that_is_held_rests_between_steps():
    inbox = Inbox(False, True)
    world = World(has_input=inbox)
    request = world.arrive(Request(params=LEG))
    world.agent.news.set()
    world.grant()
    world.side.num_new_matched_tokens(request, 0)
    world.side.after_alloc(request, tables_for(LAYOUT, N - 1), 0)
    world.schedule(request, N - 1)
    world.agent.news.clear()
    world.idle()
    assert inbox.looks == []


def test_a_rest_ends_with_the_patience_of_a_request():
    world = World(has_input=lambda: setattr(world, "now", world.now + 1.0))
    request = world.arrive(Request(params=LANDING))
    assert world.side.num_new_matched_tokens(request, 0) is None
    assert world.now == 5.0, "without a step for MAX_REST_S at most"
    local = World(has_input=lambda: setattr(local, "now", local.now + 1.0))
    request = local.arrive(Request())
    assert local.side.num_new_matched_tokens(request, 0) is None
    assert local.now == 1.0
    assert local.side.num_new_matched_tokens(request, 0) == 0


def test_nothing_rests_while_another_request_might_go_on():
    world = World(has_input=Inbox())
    request = world.arrive(Request(params=LANDING))
    world.arrive(Request("short", num_tokens=2))
    assert world.side.num_new_matched_tokens(request, 0) is None
    world.idle()


def test_local_prompts_save_whole_blocks_and_say_which_states_they_could_not(world):
    request = world.arrive(Request())
    assert not world.agent.asked, "a queue of local prompts holds no pages"
    assert world.side.num_new_matched_tokens(request, 0) is None
    assert world.agent.asked == [("begin", 3 * BLOCK, None)]
    world.grant(3 * BLOCK)
    assert world.side.num_new_matched_tokens(request, 0) == 0
    world.side.after_alloc(request, tables_for(LAYOUT, N), 0)
    step = world.schedule(request, N)
    assert (step.saves[0].start, step.saves[0].stop, step.saves[0].states) == (0, 3 * BLOCK, ())
    assert world.agent.last == [(1, [(1, 3 * BLOCK)])], "vLLM had no state there: it computed past it"
    world.agent.events.append(Written(1))
    world.idle()
    assert world.agent.ended == [(1, False, "")]


def test_a_cached_prefix_is_loaded_and_the_rest_saved(world):
    request = world.arrive(Request())
    assert world.side.num_new_matched_tokens(request, 0) is None
    world.grant(3 * BLOCK, cached=2 * BLOCK)
    assert world.side.num_new_matched_tokens(request, 0) == 2 * BLOCK
    world.side.after_alloc(request, tables_for(LAYOUT, 2 * BLOCK), 2 * BLOCK)
    world.idle()
    world.side.loads_ended({"r"}, set())
    request.num_computed_tokens = 2 * BLOCK
    step = world.schedule(request, N - 2 * BLOCK)
    assert (step.saves[0].start, step.saves[0].stop) == (2 * BLOCK, 3 * BLOCK)
    assert world.side.take_counts().cached_tokens == 2 * BLOCK


def test_what_was_computed_is_told_without_the_queue_and_without_what_vllm_had(world):
    request = world.arrive(Request(params=LEG))
    world.grant()
    world.now += 5.0
    world.side.num_new_matched_tokens(request, BLOCK)
    world.side.after_alloc(request, tables_for(LAYOUT, N - 1), 0)
    request.num_computed_tokens = BLOCK
    world.schedule(request, BLOCK)
    world.now += 2.0
    world.schedule(request, N - 1 - 2 * BLOCK)
    assert world.agent.computed == [(N - 1 - BLOCK, 2.0)]


def test_a_preempted_request_saves_nothing_twice(world):
    request = world.arrive(Request(params=LEG))
    world.grant()
    world.side.num_new_matched_tokens(request, 0)
    world.side.after_alloc(request, tables_for(LAYOUT, N - 1), 0)
    world.schedule(request, 2 * BLOCK)
    request.num_computed_tokens, request.num_preemptions = 0, 1
    assert world.side.num_new_matched_tokens(request, 0) == 0
    assert not world.schedule(request, BLOCK).saves
    assert world.schedule(request, 2 * BLOCK).saves[0].start == 2 * BLOCK


def test_a_state_is_saved_only_while_its_block_is_not_computed_past():
    """Without prefix caching a state has one block: after a step it is that of the step's end."""
    one_block = layout_of(full("a", table=0), state("s", table=1, block_tokens=1 << 20))
    world = World(layout=one_block)
    request = world.arrive(Request(params=LEG))
    pages = pages_for(one_block, N - 1)
    pages.states[1][2 * BLOCK] = pages.states[1][N - 1]
    world.agent.events.append(Granted(1, pages, ARENA))
    world.side.num_new_matched_tokens(request, 0)
    world.side.after_alloc(request, tables_for(one_block, N - 1), 0)
    world.schedule(request, BLOCK)
    world.schedule(request, 2 * BLOCK)  # past the length that is wanted
    request.num_computed_tokens, request.num_preemptions = 0, 1
    assert not world.schedule(request, 2 * BLOCK).saves, "computed once more, cut where it is wanted"
    assert world.schedule(request, N - 1 - 2 * BLOCK).saves[0].states == (N - 1,)
    assert world.agent.last == [(1, [(1, 2 * BLOCK)])]


def test_a_leg_preempted_while_held_waits_and_comes_back_from_its_pages(world):
    request = world.arrive(Request(params=LEG))
    world.grant()
    world.side.num_new_matched_tokens(request, 0)
    world.side.after_alloc(request, tables_for(LAYOUT, N - 1), 0)
    world.schedule(request, N - 1)
    request.num_computed_tokens, request.num_preemptions = 0, 1
    assert world.side.num_new_matched_tokens(request, 0) is None
    world.agent.events.append(Arrived(1, Delivered(job="j", ok=True)))
    assert world.side.num_new_matched_tokens(request, 0) == N - 1
    world.side.after_alloc(request, tables_for(LAYOUT, N - 1), N - 1)
    assert world.idle().loads
    world.side.loads_ended({"r"}, set())
    assert world.side.request_finished(request)["delivered"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"lora_request": object()}, "lora"),
        ({"mm_features": [1]}, "multimodal"),
        ({"cache_salt": "x"}, "cache_salt"),
        ({"prompt_embeds": object()}, "prompt_embeds"),
        ({"skip_reading_prefix_cache": True}, "prompt_logprobs"),
    ],
)
def test_kvcache_of_more_than_tokens_is_not_shared(world, fields, reason):
    world.arrive(Request("local", **fields))
    assert not world.agent.asked
    request = world.arrive(Request("leg", params=LEG, **fields))
    assert world.side.num_new_matched_tokens(request, 0) == 0
    assert world.side.request_finished(request) == {"delivered": False, "reason": reason}
    request = world.arrive(Request("decode", params=LANDING, **fields))
    assert world.side.num_new_matched_tokens(request, 0) == 0
    assert world.side.request_finished(request) == {"recomputed": True, "reason": reason}


def test_a_local_prompt_that_is_cached_completely_is_told(world):
    request = world.arrive(Request())
    world.side.num_new_matched_tokens(request, 0)
    world.grant(3 * BLOCK, cached=3 * BLOCK)
    assert world.side.num_new_matched_tokens(request, 0) == 3 * BLOCK
    world.side.after_alloc(request, tables_for(LAYOUT, 3 * BLOCK), 3 * BLOCK)
    world.idle()
    world.side.loads_ended({"r"}, set())
    assert world.agent.completed == [1]
    assert world.agent.ended == [(1, False, "")]


def test_the_local_tier_can_be_switched_off():
    world = World(local_tier=False)
    request = world.arrive(Request())
    assert world.side.num_new_matched_tokens(request, 0) == 0
    assert not world.agent.asked


def test_parameters_that_are_none_are_refused_or_counted(world):
    request = world.arrive(Request("leg", params={"do_remote_decode": True}))
    assert world.side.request_finished(request) == {"delivered": False, "reason": "bad_request"}
    world.arrive(Request("decode", params={"do_remote_prefill": True}))
    assert world.side.take_counts().fallbacks == {"bad_request": 1}


def test_load_is_reported(world):
    request = world.arrive(Request())
    world.idle()
    assert world.agent.loads[-1] == (0, 1, N)
    world.side.request_finished(request)
    world.idle()
    assert world.agent.loads[-1] == (0, 0, 0)

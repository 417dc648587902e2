"""A server whose requests all wait for the agent takes no steps, and none too few."""

from engine.vllm.internals import EngineAround
from tests.engine.vllm.builders import tables_for
from tests.engine.vllm.scripted import LANDING, LAYOUT, LEG, N, Request, World


class Inbox:
    """What vLLM has been sent, as often as it is looked at."""

    def __init__(self, *looks: bool) -> None:
        self.looks = list(looks)

    def __call__(self) -> bool:
        return self.looks.pop(0)


def test_while_every_request_waits_vllm_is_left_alone_until_it_is_sent_something():
    inbox = Inbox(False, False, True)
    world = World(engine=EngineAround(inbox))
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
    world = World(engine=EngineAround(inbox))
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
    world = World(engine=EngineAround(lambda: setattr(world, "now", world.now + 1.0)))
    request = world.arrive(Request(params=LANDING))
    assert world.side.num_new_matched_tokens(request, 0) is None
    assert world.now == 5.0, "without a step for MAX_REST_S at most"
    local = World(engine=EngineAround(lambda: setattr(local, "now", local.now + 1.0)))
    request = local.arrive(Request())
    assert local.side.num_new_matched_tokens(request, 0) is None
    assert local.now == 1.0
    assert local.side.num_new_matched_tokens(request, 0) == 0


def test_nothing_rests_while_another_request_might_go_on():
    world = World(engine=EngineAround(Inbox()))
    request = world.arrive(Request(params=LANDING))
    world.arrive(Request("short", num_tokens=2))
    assert world.side.num_new_matched_tokens(request, 0) is None
    world.idle()


def test_an_unchanged_load_is_told_once_a_second():
    world = World()
    request = world.arrive(Request())
    for step in range(30):
        world.now = step * 0.1
        world.schedule(request, 0)
    assert world.agent.loads == [(1, 0, N)] * 3
    request.num_computed_tokens = N
    world.now += 0.1
    world.schedule(request, 0)
    assert world.agent.loads[3:] == [(1, 0, 0)], "and at once when it is another"


def test_an_engine_in_lockstep_never_keeps_the_others_waiting():
    """Its peers compute their steps together with this one: nothing rests in it, neither here nor on its ranks."""

    class NoWait:
        def wait(self, timeout):
            raise AssertionError("the peers wait for this step")

    world = World(engine=EngineAround(Inbox(), in_lockstep=True))
    world.agent.news = NoWait()
    landing = world.arrive(Request("landing", params=LANDING))
    assert world.side.num_new_matched_tokens(landing, 0) is None
    assert not world.idle().is_idle, "its ranks do not wait for loads"
    assert world.agent.loads == [(0, 1, N)], "what waits is reported all the same"
    leg = world.arrive(Request("leg", params=LEG))
    world.grant(errand=2)
    world.side.num_new_matched_tokens(leg, 0)
    world.side.after_alloc(leg, tables_for(LAYOUT, N - 1), 0)
    world.schedule(leg, N - 1)
    world.idle()

"""A leg is held in vLLM's own scheduler, with the second model runner's flag and steps that overlap. No model runs."""

from collections.abc import Iterator

import pytest

from engine.vllm import internals
from engine.vllm.scheduler_side.errands import Arrived, ErrandFailed
from tests.engine.vllm.scripted import LEG
from tests.vllm.cases import LLAMA, build
from tests.vllm.scheduled import Scheduled, second_runner
from transport.control.messages import Delivered

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),  # importing vLLM is slow
    pytest.mark.filterwarnings("default"),
]
N = 41


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    return build(LLAMA.arch, tmp_path_factory.mktemp("models"))


@pytest.fixture
def world(model) -> Iterator[Scheduled]:
    with second_runner():
        yield Scheduled(model)


def begin_leg(world: Scheduled):
    leg = world.arrive("leg", N, LEG)
    world.grant(1, N - 1)
    assert world.begin() == {"leg": N - 1}
    return leg


def test_a_leg_is_held_while_steps_overlap_and_ends_once_it_is_delivered(world):
    leg = begin_leg(world)
    world.arrive("other", 5, None, max_tokens=8)
    assert world.begin() == {"other": 5}, "the leg's first token is on its way, and it does not decode on"
    assert not world.end()["leg"].finished
    assert world.begin() == {"other": 1}
    world.end()
    for _ in range(3):
        world.end()
        assert world.begin() == {"other": 1}
    world.agent.events.append(Arrived(1, Delivered(job="j1", ok=True, bytes_total=9)))
    world.begin()  # which hears of it
    assert world.begin()["leg"] == 1
    answers = {}
    for _ in range(3):
        answers |= world.end()
    assert answers["leg"].finished
    assert answers["leg"].kv_transfer_params["delivered"]
    assert leg.num_output_tokens == 2


def test_a_leg_is_let_go_no_sooner_than_vllm_would_have_it(world):
    """A pipeline's stages take turns: vLLM says in which step a request decodes next."""
    world.scheduler.decode_stagger = 4
    leg = begin_leg(world)
    world.agent.events.append(Arrived(1, Delivered(job="j1", ok=True)))
    world.begin()
    assert leg.next_decode_eligible_step == 1 + 4


def test_a_held_leg_whose_push_fails_is_over_with_the_next_token(world):
    begin_leg(world)
    world.begin()
    world.end()
    world.agent.events.append(ErrandFailed(1, "peer_lost"))
    world.begin()
    assert world.begin() == {"leg": 1}
    world.end()
    world.end()
    answer = world.end()["leg"]
    assert answer.finished
    assert answer.kv_transfer_params == {"delivered": False, "reason": "peer_lost"}


def test_vllms_own_scheduler_would_decode_on(model):
    """Why ours is there, and why the connector insists on it. When this fails, it need not be any more."""
    with second_runner():
        world = Scheduled(model, scheduler=None)
        begin_leg(world)
        assert world.begin() == {"leg": 1}
        with pytest.raises(ValueError, match="--scheduler-cls"):
            internals.check_scheduling(world.config)
        internals.check_scheduling(Scheduled(model).config)


def test_without_asynchronous_steps_vllms_scheduler_is_its_own(model):
    from vllm.v1.core.sched.scheduler import Scheduler

    world = Scheduled(model, asynchronous=False)
    assert type(world.scheduler) is Scheduler
    begin_leg(world)
    assert not world.end()["leg"].finished
    assert world.begin() == {}

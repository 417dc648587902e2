"""A leg is held in vLLM's own scheduler, with the second model runner's flag and steps that overlap. No model runs."""

import queue
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
    world.arrive("other", 2, None, max_tokens=8)
    assert world.begin() == {"other": 2}, "the leg's first token is on its way, and it does not decode on"
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
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    with second_runner():
        with pytest.raises(ValueError, match="--scheduler-cls"):
            Scheduled(model, scheduler=None)
        world = Scheduled(model)
        world.scheduler.__class__ = AsyncScheduler
        begin_leg(world)
        assert world.begin() == {"leg": 1}


def test_an_engine_whose_ranks_compute_together_is_known(model):
    """Data parallel ranks of a mixture of experts: each waits for the others' steps."""
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc

    class Maker:
        def make(self):
            return internals.engine_around()

    for kind, in_lockstep in ((DPEngineCoreProc, True), (EngineCoreProc, False)):
        engine = kind.__new__(kind)
        engine.input_queue, engine.output_queue = queue.Queue(), queue.Queue()
        around = Maker.make(engine)
        assert around.in_lockstep is in_lockstep
        assert not around.has_input(), "it is found"


def test_one_rank_of_several_is_a_node_and_publishes_where_its_agent_listens(model, tmp_path):
    import msgspec
    import zmq
    from vllm.config import KVEventsConfig
    from vllm.distributed.kv_events import AllBlocksCleared, EventPublisherFactory, KVEventBatch, ZmqEventPublisher

    config = Scheduled(model, asynchronous=False).config  # its connector has mended the endpoints
    config.parallel_config.data_parallel_size = 2
    with pytest.raises(ValueError, match=r"is that of 1 node: `prfaas node \.\.\. -- --data-parallel-size N`"):
        internals.check_scheduling(config)
    config.parallel_config.data_parallel_size = 1  # as an engine of a dense model is told, which is on its own
    config.parallel_config.data_parallel_index = 1
    with pytest.raises(ValueError, match="an engine for each data parallel rank, and is that of 1 node"):
        internals.check_scheduling(config)
    settings = config.kv_transfer_config.kv_connector_extra_config
    settings["other_ranks"] = [{"agent_socket": "/run/y/engine.sock", "http_url": "http://127.0.0.1:1"}]
    internals.check_scheduling(config)  # a node for each
    config.parallel_config.data_parallel_size = 3
    with pytest.raises(ValueError, match="is that of 2 nodes"):
        internals.check_scheduling(config)
    del settings["other_ranks"]
    config.parallel_config.data_parallel_size = 2
    config.parallel_config.data_parallel_external_lb = True
    internals.check_scheduling(config)
    assert ZmqEventPublisher.offset_endpoint_port("tcp://*:5557", 1) == "tcp://*:5558", "others are left alone"
    endpoint = f"ipc://{tmp_path}/kv-events"
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint, topic="")
    publisher = EventPublisherFactory.create(events, 1)
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(endpoint)
        try:
            for _ in range(100):
                publisher.publish(KVEventBatch(ts=1.0, events=[AllBlocksCleared()]))
                if socket.poll(100):
                    break
            *_, payload = socket.recv_multipart(zmq.NOBLOCK)
        finally:
            publisher.shutdown()
    assert msgspec.msgpack.decode(payload)[2] == 1


def test_without_asynchronous_steps_vllms_scheduler_is_its_own(model):
    from vllm.v1.core.sched.scheduler import Scheduler

    world = Scheduled(model, asynchronous=False)
    assert type(world.scheduler) is Scheduler
    begin_leg(world)
    assert not world.end()["leg"].finished
    assert world.begin() == {}

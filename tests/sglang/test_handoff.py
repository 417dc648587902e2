"""Pages of one pool, through two agents, in another pool: whole, in chunks, and when something goes wrong on the way."""

import asyncio
import itertools
import queue
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec import structs

torch = pytest.importorskip("torch")

from engine.errors import TransferError  # noqa: E402
from engine.sglang.agent_thread import SglangAgentThread  # noqa: E402
from engine.sglang.control import AgentControl  # noqa: E402
from engine.sglang.disaggregation.buffers import PageBuffers  # noqa: E402
from engine.sglang.disaggregation.handoff import PageChunk, ReceivingHandoff, SendingHandoff  # noqa: E402
from engine.sglang.disaggregation.pools import Buffer, Pools, layout_of  # noqa: E402
from tests.sglang.agents import ANSWER_S, Agent  # noqa: E402
from transport.control.messages import TicketInfo  # noqa: E402

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

PAGES = 40
TOKEN_BYTES = (64, 64, 32)  # of each buffer


class Server:
    """What of a server a handoff touches: memory of pages, and a link to the agent."""

    def __init__(self, agent: Agent, page: int, seed: int) -> None:
        chance = torch.Generator().manual_seed(seed)
        self.memory = [
            torch.randint(0, 256, (PAGES, page * size), dtype=torch.uint8, generator=chance) for size in TOKEN_BYTES
        ]
        buffers = tuple(
            Buffer(pointer=memory.data_ptr(), num_bytes=memory.nbytes, item_bytes=memory.shape[1])
            for memory in self.memory
        )
        pools = Pools(buffers=buffers, page_tokens=page, dtype="uint8", device="cpu")
        self.pages = PageBuffers(pools)
        self.agent = SglangAgentThread(
            agent.socket, layout_of("m", pools), model_id="m", max_model_len=4096, http_url="http://127.0.0.1:1"
        )
        self.control = AgentControl(agent.control, ttl_s=ANSWER_S)
        self.agent.start()
        assert self.agent.wait_connected(ANSWER_S)

    def holds_nothing(self, agent: Agent) -> bool:
        """Whether the agent has all of its pages back, soon."""
        from transport.control.proto import node_pb2 as pb

        waiting = threading.Event()
        for _ in range(600):
            if not agent.stub.Describe(pb.DescribeRequest(check_integrity=True), timeout=ANSWER_S).pool.reservations:
                return True
            waiting.wait(0.05)
        return False


class Request:
    """One request: pages `source` of the prefill server for pages `target` of the decode server."""

    def __init__(
        self, servers: list[Server], source: list[int], target: list[int], timeout_s: float = ANSWER_S
    ) -> None:
        self.prefill, self.decode = servers
        self.source, self.target = np.array(source, np.int32), np.array(target, np.int32)
        self.tickets: queue.Queue = queue.Queue()
        self.sent: queue.Queue[str] = queue.Queue()
        self.landed: queue.Queue[str] = queue.Queue()
        self.landing = ReceivingHandoff(
            self.decode.agent, self.decode.pages, self.decode.control, "r", self.target, timeout_s=timeout_s,
            on_ticket=self.tickets.put, on_end=self.landed.put,
        )  # fmt: skip

    def send(self, *ends: int) -> SendingHandoff:
        """Chunks up to these numbers of pages, all of them as far as they are named."""
        ticket = self.tickets.get(timeout=ANSWER_S)
        sending = SendingHandoff(self.prefill.agent, self.prefill.pages, "r", ticket, self.sent.put)
        for first, end in itertools.pairwise((0, *ends)):
            sending.put(PageChunk(first, self.source[first:end], end == len(self.source)))
        return sending

    def is_equal(self) -> bool:
        """Bit by bit, of every buffer."""
        return all(
            torch.equal(mine[torch.from_numpy(self.source).long()], theirs[torch.from_numpy(self.target).long()])
            for mine, theirs in zip(self.prefill.memory, self.decode.memory, strict=True)
        )


@pytest.fixture
def agents(tmp_path):
    pair = [Agent("prefill", tmp_path, role="prefill"), Agent("decode", tmp_path)]
    yield pair
    for agent in pair:
        agent.close()


@pytest.fixture
def servers(agents, request):
    page = getattr(request, "param", 16)
    pair = [Server(agent, page, seed) for seed, agent in enumerate(agents)]
    yield pair
    for server in pair:
        server.agent.close()


class Crowded:
    """An agent's reservations; the first ones find no room."""

    def __init__(self, control: AgentControl, refusals: int, reason: str = "no_capacity") -> None:
        self._control = control
        self._refusals = refusals
        self._reason = reason
        self.asked = 0

    async def reserve(self, request_id: str, num_tokens: int, digest: bytes) -> TicketInfo:
        self.asked += 1
        if self.asked <= self._refusals:
            raise TransferError(self._reason)
        return await self._control.reserve(request_id, num_tokens, digest)

    async def abort(self, transfer_id: str) -> None:
        await self._control.abort(transfer_id)


def test_a_landing_waits_a_moment_for_room(agents, servers):
    crowded = servers[1].control = Crowded(servers[1].control, refusals=3)
    request = Request(servers, [3, 1, 2], [0, 5, 9])
    request.send(3)
    assert (request.landed.get(timeout=ANSWER_S), request.sent.get(timeout=ANSWER_S)) == ("", "")
    assert crowded.asked == 4
    assert request.is_equal()


def test_other_refusals_are_final(servers):
    crowded = servers[1].control = Crowded(servers[1].control, refusals=1, reason="draining")
    assert Request(servers, [3], [0]).landed.get(timeout=ANSWER_S) == "draining"
    assert crowded.asked == 1


@pytest.mark.parametrize("servers", [1, 16, 64], indirect=True)
@pytest.mark.parametrize("ends", [(7,), (1, 2, 7), (3, 3, 7), (6, 7, 7)])
def test_pages_arrive_bit_by_bit_and_nothing_else_is_touched(agents, servers, ends):
    before = [memory.clone() for memory in servers[1].memory]
    request = Request(servers, source=[3, 1, 4, 15, 9, 2, 6], target=[5, 35, 8, 9, 7, 0, 39])
    request.send(*ends)
    assert request.landed.get(timeout=ANSWER_S) == ""
    assert request.sent.get(timeout=ANSWER_S) == ""
    assert request.is_equal()
    others = [page for page in range(PAGES) if page not in request.target]
    assert all(torch.equal(now[others], then[others]) for now, then in zip(servers[1].memory, before, strict=True))
    assert all(server.holds_nothing(agent) for server, agent in zip(servers, agents, strict=True))


def test_requests_side_by_side_do_not_mix(servers):
    requests = [
        Request(servers, source=[n, n + 10], target=[30 - n, 39 - n]) for n in range(8)
    ]  # fmt: skip
    for request in requests:
        request.send(1, 2)
    assert [request.landed.get(timeout=ANSWER_S) for request in requests] == [""] * 8
    assert all(request.is_equal() for request in requests)


def test_nothing_is_written_once_decode_has_given_up(agents, servers):
    before = [memory.clone() for memory in servers[1].memory]
    request = Request(servers, source=[0, 1], target=[2, 3])
    request.tickets.put(ticket := request.tickets.get(timeout=ANSWER_S))
    request.landing.give_up()
    request.send(2)
    assert request.sent.get(timeout=ANSWER_S) != ""  # the receiver is gone
    assert ticket.num_tokens == 32
    assert all(torch.equal(now, then) for now, then in zip(servers[1].memory, before, strict=True))
    assert request.landed.empty()
    assert all(server.holds_nothing(agent) for server, agent in zip(servers, agents, strict=True))


def test_decode_hears_when_prefill_gives_up_half_way(agents, servers):
    request = Request(servers, source=[0, 1, 2], target=[2, 3, 4], timeout_s=3.0)
    sending = request.send(1)
    sending.give_up()
    assert request.landed.get(timeout=ANSWER_S) != ""
    assert request.sent.empty()
    assert all(server.holds_nothing(agent) for server, agent in zip(servers, agents, strict=True))


def test_decode_does_not_wait_for_ever(agents, servers):
    request = Request(servers, source=[0], target=[1], timeout_s=0.2)
    assert "landing_timeout" in request.landed.get(timeout=ANSWER_S)
    assert servers[1].holds_nothing(agents[1])


def test_a_request_that_has_no_room_is_refused(servers):
    huge = Request(servers, source=[0], target=[0] * 100_000)
    assert "no_capacity" in huge.landed.get(timeout=ANSWER_S)


def test_pages_that_are_not_there_end_the_request(agents, servers):
    request = Request(servers, source=[PAGES], target=[1], timeout_s=3.0)
    request.send(1)
    assert "40" in request.sent.get(timeout=ANSWER_S)
    assert request.landed.get(timeout=ANSWER_S) != ""


@pytest.mark.parametrize("dead", [0, 1])
def test_a_dead_agent_ends_the_request_on_its_side(agents, servers, dead):
    request = Request(servers, source=[0, 1], target=[2, 3], timeout_s=5.0)
    request.send(1)  # the last page is not computed yet
    agents[dead].kill()
    assert (request.sent, request.landed)[dead].get(timeout=ANSWER_S) != ""
    again = Request(servers, source=[0], target=[1], timeout_s=2.0)
    if dead == 0:
        again.send(1)
        assert "agent_gone" in again.sent.get(timeout=ANSWER_S)
    else:
        assert again.landed.get(timeout=ANSWER_S) != ""


def test_a_ticket_for_another_layout_is_refused(servers):
    request = Request(servers, source=[0], target=[1], timeout_s=3.0)
    ticket = request.tickets.get(timeout=ANSWER_S)
    request.tickets.put(structs.replace(ticket, layout_fingerprint="0" * 64))
    request.send(1)
    assert "layout_mismatch" in request.sent.get(timeout=ANSWER_S)
    assert "landing_timeout" in request.landed.get(timeout=ANSWER_S)


@pytest.mark.parametrize("answers_s", [0.0, 0.1])
def test_a_landing_that_is_given_up_while_it_is_reserved_tells_nobody_its_ticket(answers_s):
    """Prefill has been told that decode has ended the request: a ticket after that would open it anew there."""
    told, ended, aborted = [], [], asyncio.Event()
    ticket = TicketInfo(
        transfer_id="t", secret=b"s", num_tokens=1, have_tokens=0, tokens_digest=b"", endpoints=(), ttl_s=1.0,
        layout_fingerprint="l", node_id="n", cluster="c",
    )  # fmt: skip

    class Control:
        async def reserve(self, *_):
            landing.give_up()
            if answers_s:  # its pages are reserved by now, and the answer is on its way
                await asyncio.sleep(answers_s)
            return ticket

        async def abort(self, _):
            aborted.set()

    async def scenario():
        nonlocal landing
        loop = asyncio.get_running_loop()
        job = SimpleNamespace(pages=loop.create_future, end=lambda **_: None)
        agent = SimpleNamespace(
            later=loop.call_soon_threadsafe, layout=SimpleNamespace(block_size=1),
            link=SimpleNamespace(claim_landing=lambda *_: job),
        )  # fmt: skip
        landing = ReceivingHandoff(
            agent, [], Control(), "r", np.zeros(1, np.int32), timeout_s=1.0, on_ticket=told.append, on_end=ended.append
        )
        async with asyncio.timeout(60.0):
            await aborted.wait()

    landing = None
    asyncio.run(scenario())
    assert (told, ended) == ([], [])

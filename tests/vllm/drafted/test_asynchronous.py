"""Drafts over recurrent states where steps overlap: what is handed over is what a server without drafts hands over."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.vllm.cases import LLAMA, build
from tests.vllm.drafted.hybrid import Job, Server, left, mistakes
from tests.vllm.scheduled import BLOCK, second_runner

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),  # importing vLLM is slow
    pytest.mark.filterwarnings("default"),
]
LIMIT = 120  # steps


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(LLAMA.arch, tmp_path_factory.mktemp("models"))


@contextmanager
def served(model: Path, **options) -> Iterator[Server]:
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        second_runner(),
        Server(model, Path(folder), **options) as server,
    ):
        yield server


def lacking(job: Job) -> list[tuple[int, int]]:
    """What a leg leaves out of its end."""
    assert job.unfilled is not None
    return [each for each in job.unfilled if each[1] == len(job.prompt)]


def run_until_idle(server: Server, *, every: int = 3) -> None:
    for number in range(LIMIT):
        if not server.scheduled.scheduler.requests:
            break
        server.step()
        if number % every == every - 1:
            server.hear()
    assert not server.scheduled.scheduler.requests, "requests are left"
    server.hear()


PROMPT = [3 + 7 * at % 500 for at in range(6 * BLOCK)]


def legs(server: Server) -> list[Job]:
    return [job for job in server.agent.jobs.values() if job.is_leg]


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_a_leg_hands_over_its_last_state(model: Path, drafts: int, aligned: bool) -> None:
    with served(model, drafts=drafts, aligned=aligned, right=(1, 0, 3)) as server:
        for number, length in enumerate((2, 5, BLOCK, BLOCK + 1, BLOCK + 2, 3 * BLOCK + 1, 5 * BLOCK)):
            server.ask(f"leg{number}", [number * 100 + 3 + at for at in range(length)], [7, 8, 9], leg=True)
        server.ask("other", range(200, 240), [5, 6], leg=False)
        run_until_idle(server)
        assert mistakes(server) == []
        assert [(job.request, lacking(job)) for job in legs(server) if lacking(job)] == []
        assert all(server.answered[job.request].kv_transfer_params["delivered"] for job in legs(server))


@pytest.mark.parametrize("drafts", [1, 3, BLOCK - 1])
@pytest.mark.parametrize("answer", [[7], [0], [0, 7]], ids=["none right", "all right", "some right"])
def test_a_leg_is_held_whatever_its_padding_is_worth(model: Path, drafts: int, answer: list[int]) -> None:
    """vLLM pads a prompt's last token with drafts of token 0. Where the model says that, several tokens are sampled at once."""
    with served(model, drafts=drafts, aligned=True) as server:
        server.ask("first", PROMPT[: 2 * BLOCK + 9], [7], leg=True)
        run_until_idle(server)
        server.ask("second", PROMPT[: 2 * BLOCK + 2], answer, leg=True)
        server.begin()
        assert server.counts["second"] == 1 + drafts, "its last token alone, and padding"
        run_until_idle(server)
        assert mistakes(server) == []
        assert server.answered["second"].kv_transfer_params["delivered"]
        (job,) = (job for job in legs(server) if job.request == "second")
        assert lacking(job) == []


@pytest.mark.parametrize("aligned", [False, True])
def test_the_state_of_a_prompt_of_one_token_is_not_handed_over_if_it_is_padded(model: Path, aligned: bool) -> None:
    """A prompt's first tokens are computed as one piece: its drafts are in the state. (In vLLM's own, too.)"""
    with served(model, drafts=3, aligned=aligned) as server:
        server.ask("other", PROMPT[:5], [7], leg=False, max_tokens=20)
        for _ in range(3):
            server.step()
        server.ask("leg", [11, 12], [7], leg=True)
        run_until_idle(server)
        assert mistakes(server) == []
        (leg,) = legs(server)
        assert lacking(leg) == [(1, 1)]


def test_a_leg_that_left_without_a_state_does_not_load_it_after_a_preemption(model: Path) -> None:
    """The leg is preempted after its delivery, and its pages hold attention but no state: the engine computes it again."""
    with served(model, drafts=1, aligned=True, right=(1,), blocks=160) as server:
        server.ask("other", PROMPT[:5], [8, 7, 7, 0, 7], leg=False, max_tokens=9)
        server.step()
        server.ask("leg", PROMPT[:2], [8], leg=True)
        server.step()
        server.preempt()
        run_until_idle(server)
        assert mistakes(server) == []
        (leg,) = legs(server)
        assert lacking(leg) == [(1, 1)]


def test_without_waits_of_the_device_steps_overtake_copies(model: Path) -> None:
    """The control: the same server, whose next steps do not wait for the copies of the one before."""
    with served(model, drafts=3, aligned=True, keeps_order=False) as server:
        for number in range(3):
            server.ask(f"leg{number}", PROMPT[number : number + 4 * BLOCK], [7], leg=True)
        run_until_idle(server)
        assert mistakes(server)


LENGTHS = st.one_of(
    st.integers(2, 6 * BLOCK),
    st.builds(lambda block, more: block * BLOCK + more, st.integers(1, 5), st.integers(1, 3)),
    st.just(2),
)


@st.composite
def actions(draw: st.DrawFn) -> list[tuple[str, int]]:
    kinds = st.sampled_from(["step"] * 6 + ["hear", "preempt", "abort", "leg", "leg", "local"])
    return draw(st.lists(st.tuples(kinds, st.integers(0, 9)), min_size=5, max_size=60))


@dataclass(frozen=True)
class Story:
    """What happens at a server. `warm`: how many tokens of the prompt it has computed before, one request for each."""

    drafts: int
    aligned: bool
    is_tight: bool
    warm: Sequence[int]
    right: Sequence[int]
    lengths: Sequence[int]  # of prompts
    answer: Sequence[int]
    doing: Sequence[tuple[str, int]]


ANY = st.builds(
    Story,
    drafts=st.sampled_from([0, 1, 2, 4, BLOCK - 1, BLOCK]),
    aligned=st.booleans(),
    is_tight=st.booleans(),
    warm=st.sampled_from([(), (len(PROMPT),)]),
    right=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    lengths=st.lists(LENGTHS, min_size=1, max_size=5),
    answer=st.lists(st.sampled_from([0, 0, 7, 8]), min_size=1, max_size=5),
    doing=actions(),
)


@st.composite
def padded(draw: st.DrawFn) -> Story:
    """The last token of a leg is computed alone, as all before it is cached. Its padding is right, or the first of it is."""
    borders = draw(st.lists(st.integers(1, 5).map(lambda blocks: blocks * BLOCK), min_size=1, max_size=3))
    return replace(
        draw(ANY),
        drafts=draw(st.sampled_from([1, 2, BLOCK - 1, BLOCK])),
        aligned=True,
        warm=[border + 9 for border in borders],
        lengths=[border + 2 for border in borders],
        answer=draw(st.sampled_from([[0], [0, 0, 7]])),
        doing=[("leg", draw(st.integers(0, 9))), ("step", 0), *draw(actions())],
    )


@st.composite
def beside(draw: st.DrawFn) -> Story:
    """A leg whose first token is its last one comes while others are answered."""
    doing = [("local", 8), *[("step", 0)] * draw(st.integers(2, 4)), ("leg", 1), *draw(actions())]
    return replace(draw(ANY), drafts=draw(st.integers(1, 4)), is_tight=False, lengths=[5, 2], doing=doing)


@given(st.one_of(ANY, padded(), beside()))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_is_announced_is_that_of_a_server_without_drafts(model: Path, story: Story) -> None:
    """Whatever is accepted, however prompts are cut, and which of them are preempted or leave in between."""
    drafts, lengths, answer = story.drafts, story.lengths, story.answer
    blocks = 14 + 4 * (2 + drafts) if story.is_tight else 160  # for two or three requests, or for all
    with served(model, drafts=drafts, aligned=story.aligned, right=story.right, blocks=blocks) as server:
        for number, length in enumerate(story.warm):  # vLLM has beginnings of prompts, so ends of one token are padded
            server.ask(f"warm{number}", PROMPT[:length], answer, leg=True)
            run_until_idle(server)
        for number, (kind, which) in enumerate(story.doing):
            match kind:
                case "leg" | "local":
                    length, begin = lengths[which % len(lengths)], 0 if which % 3 else which % 2
                    prompt = [*PROMPT[begin:], *PROMPT][:length]
                    server.ask(f"{kind}{number}", prompt, answer, leg=kind == "leg", max_tokens=1 + which)
                case "preempt":
                    server.preempt()
                case "abort":
                    if names := sorted(server.scheduled.scheduler.requests):
                        server.abort(names[which % len(names)])
                case "hear":
                    server.hear()
                case _:
                    server.step()
        run_until_idle(server)
        server.begin()  # which ends what is over
        assert mistakes(server) == []
        assert left(server) == {}
        for job in legs(server):
            if (answered := server.answered.get(job.request)) is not None:
                assert lacking(job) == [] or len(job.prompt) == 1
                assert answered.kv_transfer_params["delivered"]
                assert server.said[job.request][:1] == [answer[0]]

"""What goes wrong is recomputed, counted and given back: aborts, refusals, preemption, nodes that die."""

from itertools import count

import msgspec
import pytest

from tests.vllm.cases import GRANITE, LLAMA, Case
from tests.vllm.harness import ANSWER_S, Engine, Pair, prompt_of, telling_prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.dimensions(start="failures")]

TOKENS = 16
_seeds = count(10_000)


@pytest.fixture(scope="module", params=[LLAMA, GRANITE], ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def fresh_prompt(reference: Engine, num_tokens: int = 600) -> list[int]:
    return telling_prompt(reference, num_tokens, _seeds)


def expected(reference: Engine, prompt: list[int], max_tokens: int = TOKENS) -> list[int]:
    return reference.submit(f"x{next(_seeds)}", prompt, max_tokens).result(ANSWER_S).tokens


def assert_hands_over(pair: Pair, reference: Engine) -> None:
    prompt = fresh_prompt(reference)
    leg, decode = pair.hand_over(prompt, TOKENS)
    assert leg.result(ANSWER_S).params["delivered"]
    assert decode.result(ANSWER_S).tokens == expected(reference, prompt)


def test_a_landing_that_nobody_knows_is_recomputed(pair: Pair, reference: Engine) -> None:
    prompt = fresh_prompt(reference)
    ticket = msgspec.structs.replace(pair.reserve(prompt), transfer_id="0" * 32)
    answer = pair.consumer.engine.submit(pair.name(), prompt, TOKENS, pair.landing_params(ticket)).result(ANSWER_S)
    assert answer.tokens == expected(reference, prompt)


def test_a_landing_that_never_comes_is_recomputed(pair: Pair, reference: Engine) -> None:
    prompt = fresh_prompt(reference)
    params = pair.landing_params(pair.reserve(prompt), timeout_s=0.5)
    answer = pair.consumer.engine.submit(pair.name(), prompt, TOKENS, params).result(ANSWER_S)
    assert answer.tokens == expected(reference, prompt)
    pair.assert_idle()


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [("layout_fingerprint", "0" * 64, "layout_mismatch"), ("tokens_digest", b"0" * 32, "digest_mismatch")],
)
def test_a_leg_that_does_not_fit_is_refused(pair: Pair, field: str, value: object, reason: str) -> None:
    prompt = prompt_of(600, next(_seeds))
    ticket = msgspec.structs.replace(pair.reserve(prompt), **{field: value})
    answer = pair.producer.engine.submit(pair.name(), prompt, 1, pair.leg_params(ticket)).result(ANSWER_S)
    assert answer.params == {"delivered": False, "reason": reason}
    pair.assert_idle()


def test_a_leg_without_its_ticket_is_refused(pair: Pair) -> None:
    params = {"do_remote_decode": True, "salt": pair.salt.hex()}
    answer = pair.producer.engine.submit(pair.name(), prompt_of(600, next(_seeds)), 1, params).result(ANSWER_S)
    assert answer.params == {"delivered": False, "reason": "bad_request"}


def test_aborts_on_either_side_give_everything_back(pair: Pair, reference: Engine) -> None:
    for side in ("p", "d", "pd"):
        prompt, name = fresh_prompt(reference, 1200), pair.name()
        ticket = pair.reserve(prompt)
        pair.producer.engine.submit(f"{name}-p", prompt, 1, pair.leg_params(ticket))
        pair.consumer.engine.submit(f"{name}-d", prompt, TOKENS, pair.landing_params(ticket, timeout_s=1.0))
        if "p" in side:
            pair.producer.engine.abort(f"{name}-p")
        if "d" in side:
            pair.consumer.engine.abort(f"{name}-d")
            pair.consumer.agent.abort(ticket.transfer_id)
    assert_hands_over(pair, reference)
    pair.assert_idle()


def test_a_restarted_agent_is_joined_again(pair: Pair, reference: Engine) -> None:
    prompt = fresh_prompt(reference)
    ticket = pair.reserve(prompt)
    decode = pair.consumer.engine.submit(pair.name(), prompt, TOKENS, pair.landing_params(ticket))
    pair.consumer.agent.kill()
    assert decode.result(ANSWER_S).tokens == expected(reference, prompt)
    pair.consumer.agent.start()
    pair.wait_ready()
    assert_hands_over(pair, reference)
    pair.assert_idle()


def test_a_producer_that_dies_is_done_without(pair: Pair, reference: Engine) -> None:
    prompt, name = fresh_prompt(reference, 2000), pair.name()
    ticket = pair.reserve(prompt)
    pair.producer.engine.submit(f"{name}-p", prompt, 1, pair.leg_params(ticket))
    pair.producer.engine.kill()
    pair.producer.agent.kill()
    params = pair.landing_params(ticket, timeout_s=1.0)
    answer = pair.consumer.engine.submit(f"{name}-d", prompt, TOKENS, params).result(ANSWER_S)
    assert answer.tokens == expected(reference, prompt)
    pair.producer.agent.start()
    pair.producer.engine = pair.producer.engine.successor()
    pair.wait_ready()
    assert_hands_over(pair, reference)
    pair.assert_idle()


def test_a_consumer_engine_that_dies_finds_its_prefixes_again(pair: Pair, reference: Engine) -> None:
    prompt = fresh_prompt(reference, 1200)
    leg, _ = pair.hand_over(prompt, TOKENS)
    pair.consumer.engine.kill()
    leg.result(ANSWER_S)  # delivered, or failed: it ends
    pair.consumer.engine = pair.consumer.engine.successor()
    pair.wait_ready()
    assert_hands_over(pair, reference)
    pair.assert_idle()  # what was not claimed goes with its lease

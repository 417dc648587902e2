import numpy as np
import pytest

from engine.errors import EngineError
from engine.runtime.sampling import Sampler, SamplingParams, distribution, log_softmax

LOGITS = np.array([0.0, 3.0, 2.0, 1.0, -1.0], np.float32)


def sampler(**params):
    return Sampler(SamplingParams(**({"max_tokens": 100} | params)), end_tokens=params.pop("end_tokens", ()))


def draw(count, logits=LOGITS, **params):
    chooser = sampler(**params)
    return [chooser.sample(logits, position).token for position in range(count)]


def test_greedy_takes_the_largest():
    assert draw(3, temperature=0.0) == [1, 1, 1]


def test_frequencies_follow_the_distribution():
    counts = np.bincount(draw(4000, seed=1), minlength=5) / 4000
    assert np.abs(counts - distribution(LOGITS, temperature=1.0, top_k=0, top_p=1.0)).max() < 0.03


def test_top_k_and_top_p_cut_the_tail():
    assert set(draw(300, top_k=2, temperature=2.0)) == {1, 2}
    assert set(draw(300, top_p=0.5)) == {1}
    assert set(draw(300, top_p=0.85)) == {1, 2}
    assert distribution(LOGITS, temperature=1.0, top_k=3, top_p=1.0)[[0, 4]].tolist() == [0.0, 0.0]


def test_equal_seeds_equal_tokens_and_positions_matter():
    assert draw(50, seed=3) == draw(50, seed=3)
    assert draw(50, seed=3) != draw(50, seed=4)
    assert len(set(draw(50, seed=3))) > 1


def test_continuation_elsewhere_draws_the_same():
    """A new sampler at position 20 goes on as the old one would have."""
    whole = draw(40, seed=9)
    second = sampler(seed=9)
    assert [second.sample(LOGITS, position).token for position in range(20, 40)] == whole[20:]


def test_end_tokens_are_barred_until_min_tokens():
    params = SamplingParams(max_tokens=9, min_tokens=2, temperature=0.0)
    chooser = Sampler(params, end_tokens=[1])
    assert [chooser.sample(LOGITS, i).token for i in range(3)] == [2, 2, 1]


def test_penalties_and_bias():
    assert draw(3, temperature=0.0, presence_penalty=1.5) == [1, 2, 1]
    assert draw(4, temperature=0.0, frequency_penalty=2.0) == [1, 2, 1, 3]
    assert draw(1, temperature=0.0, logit_bias={4: 50.0}) == [4]


def test_logprobs_are_of_the_plain_distribution():
    sampled = sampler(temperature=0.0, top_logprobs=2, logit_bias={4: 50.0}).sample(LOGITS, 0)
    plain = log_softmax(LOGITS)
    assert sampled.token == 4
    assert sampled.logprob == pytest.approx(plain[4])
    assert [(t.token, t.logprob) for t in sampled.top] == [(1, pytest.approx(plain[1])), (2, pytest.approx(plain[2]))]
    assert sampler(temperature=0.0, top_logprobs=0).sample(LOGITS, 0).top == ()


def test_logits_are_left_as_they_are():
    logits = LOGITS.copy()
    draw(5, logits, top_k=2, presence_penalty=1.0, min_tokens=3, logit_bias={0: 1.0})
    assert np.array_equal(logits, LOGITS)


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-300, 1e-9])
def test_a_temperature_next_to_0_takes_the_largest(temperature):
    assert draw(3, temperature=temperature) == [1, 1, 1]
    assert draw(3, temperature=temperature, top_k=2, top_p=0.5) == [1, 1, 1]
    assert draw(2, np.array([-np.inf, 9e30, -9e30], np.float32), temperature=temperature) == [1, 1]


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1.0])
@pytest.mark.parametrize("worst", [[np.nan, 1.0], [1.0, np.nan], [-np.inf, -np.inf], [np.inf, np.inf]])
def test_no_token_is_chosen_from_what_is_no_number(temperature, worst):
    with pytest.raises(EngineError, match="no token can be chosen"):
        draw(1, np.array(worst, np.float32), temperature=temperature)

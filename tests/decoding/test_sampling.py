"""The processed distribution against transformers' own processors, and bad values."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from bastion.decoding.sampling import Sampler, SamplingParameters, distribution
from bastion.errors import BastionError


def reference(scores, parameters):
    warpers = LogitsProcessorList([TemperatureLogitsWarper(parameters.temperature)])
    if parameters.top_k:
        warpers.append(TopKLogitsWarper(parameters.top_k))
    if parameters.top_p < 1:
        warpers.append(TopPLogitsWarper(parameters.top_p))
    if parameters.min_p > 0:
        warpers.append(MinPLogitsWarper(parameters.min_p))
    return warpers(None, scores[None])[0].softmax(-1)


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from([5, 300, 3000]),  # 3000 is beyond the head that is looked at first
    st.integers(0, 10**6),
    st.sampled_from([0.01, 1.0, 6.0]),
    st.sampled_from([0.3, 1.0, 2.0]),
    st.sampled_from([0, 1, 7, 5000]),
    st.sampled_from([0.1, 0.5, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 0.05, 0.5]),
)
def test_distribution_is_that_of_transformers(vocabulary, seed, spread, temperature, top_k, top_p, min_p):
    scores = torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)) * spread
    parameters = SamplingParameters(temperature, top_k, top_p, min_p)
    tokens, probabilities = distribution(scores, parameters)
    ours = torch.zeros(vocabulary).index_add(0, tokens, probabilities)
    theirs = reference(scores, parameters)
    # A token whose mass lies on the border of the nucleus may fall on either side in float32.
    assert (ours - theirs).abs().max() < 2e-3
    assert abs(int((ours > 1e-20).sum()) - int((theirs > 1e-20).sum())) <= 1
    assert torch.equal(tokens, tokens.sort().values)


def test_draws_follow_the_distribution():
    scores = torch.tensor([0.0, 1.0, 2.0, -1.0])
    parameters = SamplingParameters(temperature=1.0, top_p=0.95, seed=1)
    choose = Sampler(parameters).chooser(scores[None], [])
    counts = torch.bincount(torch.tensor([choose(0, []) for _ in range(20_000)]), minlength=4) / 20_000
    tokens, probabilities = distribution(scores, parameters)
    assert counts[tokens].tolist() == pytest.approx(probabilities.tolist(), abs=0.015)
    assert counts[3] == 0


def test_processors_see_the_text_and_the_path():
    seen = []

    class Spy(LogitsProcessor):
        def __call__(self, input_ids, scores):
            seen.append(input_ids[0].tolist())
            return scores

    choose = Sampler(SamplingParameters(processors=[Spy()])).chooser(torch.randn(3, 8), [4, 5])
    choose(0, [])
    choose(2, [1, 6])
    assert seen == [[4, 5], [4, 5, 1, 6]]


def test_repetition_penalty_is_that_of_transformers_at_temperature_zero():
    logits = torch.tensor([[2.0, 1.9, 0.5]])
    choose = Sampler(SamplingParameters(repetition_penalty=1.5)).chooser(logits, [0])
    expected = RepetitionPenaltyLogitsProcessor(1.5)(torch.tensor([[0]]), logits.clone()).argmax()
    assert choose(0, []) == int(expected) == 1


def test_very_low_temperatures_are_greedy_and_infinite_logits_are_refused():
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert Sampler(SamplingParameters(temperature=1e-45)).chooser(logits, [])(0, []) == 1
    with pytest.raises(BastionError, match="not finite"):
        Sampler(SamplingParameters(temperature=1.0)).chooser(logits * float("nan"), [])(0, [])


def test_same_seed_same_draws_other_seed_other_draws():
    def draws(seed):
        choose = Sampler(SamplingParameters(temperature=1.0, seed=seed)).chooser(torch.zeros(1, 1000), [])
        return [choose(0, []) for _ in range(8)]

    assert draws(3) == draws(3)
    assert draws(3) != draws(4)
    assert draws(None) != draws(None)


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1}, {"temperature": float("nan")}, {"temperature": float("inf")}, {"top_k": -1},
        {"top_p": 0.0}, {"top_p": 1.1}, {"min_p": -0.1}, {"min_p": 2.0}, {"repetition_penalty": 0.0},
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused(bad):
    (name,) = bad
    with pytest.raises(BastionError, match=f"{name} must be"):
        SamplingParameters(**bad)

"""Drawing a token: the inverse CDF, its log-prob and the entropy, against exact float64
arithmetic.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.model import head, truncation
from tests.decoding import draws_of


def reference(logits: np.ndarray, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities and cumulative probabilities in float64."""
    z = logits.astype(np.float64) / temperature
    logp = z - z.max() - np.log(np.exp(z - z.max()).sum())
    return logp, np.cumsum(np.exp(logp))


def draw_one(
    logits: np.ndarray, uniform: float, temperature: float = 1.0
) -> tuple[int, float, float]:
    drawn = draws_of(torch.from_numpy(logits)[None], np.float32([temperature]), np.array([uniform]))
    return int(drawn.tokens[0]), float(drawn.logprobs[0]), float(drawn.entropies[0])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31), vocabulary=st.sampled_from([2, 7, 100, 255, 256, 257, 1000, 5003]),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.5]), uniform=st.floats(1e-9, 1 - 1e-9),
    spread=st.sampled_from([0.1, 3.0, 12.0]),
)  # fmt: skip
def test_the_token_is_the_inverse_cdf_and_its_log_prob_and_the_entropy_are_exact(
    seed, vocabulary, temperature, uniform, spread
):
    logits = np.random.default_rng(seed).normal(0, spread, vocabulary).astype(np.float32)
    token, logprob, entropy = draw_one(logits, uniform, temperature)
    logp, cdf = reference(logits, temperature)
    below = cdf[token - 1] if token else 0.0
    assert below - 1e-6 <= uniform <= cdf[token] + 1e-6
    assert logprob == pytest.approx(logp[token], abs=2e-5)
    assert entropy == pytest.approx(-(np.exp(logp) * logp).sum(), abs=2e-5)


def test_frequencies_over_an_even_grid_of_uniforms_match_the_probabilities():
    logits = np.random.default_rng(0).normal(0, 2, 600).astype(np.float32)
    count = 40_000
    uniforms = (np.arange(count) + 0.5) / count
    drawn = draws_of(
        torch.from_numpy(logits).expand(count, -1), np.full(count, 0.7, dtype=np.float32), uniforms
    )
    frequencies = np.bincount(drawn.tokens, minlength=600) / count
    assert np.abs(frequencies - np.exp(reference(logits, 0.7)[0])).max() <= 1.01 / count + 1e-6


def test_a_vocabulary_of_152k_keeps_its_rare_tokens():
    """In a float32 running sum the last tokens, 1e-7 each, would fall between the steps."""
    logits = np.zeros(151_936, dtype=np.float32)
    logits[0] = 16.0
    _, cdf = reference(logits, 1.0)
    wanted = np.array([5, 70_000, 151_900, 151_935])
    middles = (cdf[wanted] + cdf[wanted - 1]) / 2
    drawn = draws_of(torch.from_numpy(logits).expand(4, -1), np.ones(4, dtype=np.float32), middles)
    assert np.abs(drawn.tokens - wanted).max() <= 1


@pytest.mark.parametrize("uniform", [2.0**-54, 0.5, 1 - 2.0**-53])
def test_a_token_of_probability_zero_is_never_drawn(uniform):
    logits = np.full(700, -np.inf, dtype=np.float32)
    logits[[300, 301, 520]] = [0.0, -200.0, 1.0]  # 301 underflows to zero
    token, logprob, entropy = draw_one(logits, uniform)
    assert token in (300, 520)
    assert np.isfinite([logprob, entropy]).all()
    assert token == (300 if uniform < 0.2 else 520)


def test_equal_cumulative_sums_go_to_the_lower_id():
    assert (
        draw_one(np.zeros(4, dtype=np.float32), 0.5)[0] == 1
    )  # the cumulative sum of ids 0 and 1 is exactly 0.5


def test_temperature_zero_takes_the_lowest_id_of_the_largest_logit_with_certainty():
    logits = torch.tensor([[0.0, 3.0, 3.0, -1.0], [0.0, 3.0, 3.0, -1.0]])
    drawn = draws_of(logits, np.array([0.0, 1.0], dtype=np.float32), np.array([0.999999, 0.999999]))
    assert drawn.tokens.tolist() == [1, 3]
    assert (drawn.logprobs[0], drawn.entropies[0]) == (0.0, 0.0)
    assert drawn.logprobs[1] < -1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_show_in_the_log_prob_of_their_row_only(bad, temperature):
    logits = torch.zeros(2, 300)
    logits[1, 280] = bad
    drawn = draws_of(logits, np.float32([temperature, temperature]), np.array([0.3, 0.3]))
    assert np.isfinite(drawn.logprobs[0]) and not np.isfinite(drawn.logprobs[1])


def test_the_sums_of_devices_without_a_deterministic_cumsum_draw_the_same_tokens(monkeypatch):
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 3, (500, 9000)).astype(np.float32))
    arguments = logits, np.full(500, 0.9, dtype=np.float32), np.random.default_rng(2).random(500)
    expected = draws_of(*arguments)
    monkeypatch.setattr(truncation, "BY_PRODUCT", {"cpu"})
    found = draws_of(*arguments)
    assert np.array_equal(found.tokens, expected.tokens)
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-6)
    test_a_token_of_probability_zero_is_never_drawn(1 - 2.0**-53)


def test_a_row_does_not_depend_on_the_chunk_it_is_in():
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 3, (200, 9000)).astype(np.float32))
    uniforms = np.random.default_rng(2).random(200)
    temperatures = np.full(200, 0.9, dtype=np.float32)
    together = draws_of(logits, temperatures, uniforms)
    alone = [
        draws_of(logits[i : i + 1], temperatures[:1], uniforms[i : i + 1]) for i in (0, 57, 199)
    ]
    for row, single in zip((0, 57, 199), alone, strict=True):
        assert (together.tokens[row], together.logprobs[row]) == (
            single.tokens[0],
            single.logprobs[0],
        )


@pytest.mark.parametrize("in_place", [False, True])
def test_exponentials_are_zero_where_float32_has_no_normal_number(in_place: bool) -> None:
    x = torch.tensor([0.0, -1.5, -50.0, -86.0, -88.0, -103.0, -200.0, -1e4, -torch.inf, torch.nan])
    given = x.clone()
    found = head.exponentials(given, out=given if in_place else None)
    assert (found.data_ptr() == given.data_ptr()) is in_place
    assert in_place or given.nan_to_num().equal(x.nan_to_num())
    assert found[:4].equal(x[:4].exp()) and found[4:9].eq(0).all() and found[9].isnan()

"""top_k, top_p and min_p in the sampler: the kept set by its definition, and draws from the
renormalized distribution.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.model import truncation
from retrain.model.truncation import FixedKeptSets, KeptSets
from tests.decoding import cuts_of, draws_of

OFF = (0, 1.0, 0.0)
ROUNDING = 1e-6
"""Float32 exponentials may put a boundary that lies this close to top_p on either side."""


def reference_sets(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> list[list[int]]:
    """The kept set in float64, as the definition says it, token by token; more than one where the
    boundary is within rounding.
    """
    z = logits.astype(np.float32) / np.float32(temperature)
    order = np.lexsort((np.arange(len(z)), -z))
    z64 = z[order].astype(np.float64) - float(z.max())
    after_top_k = order[: top_k or None]
    probabilities = np.exp(z64[: len(after_top_k)])
    cumulative = np.cumsum(probabilities) / probabilities.sum()
    tall = int((z64 >= np.log(min_p)).sum()) if min_p else len(z)
    lengths = [len(after_top_k)] * 2
    if top_p < 1:
        lengths = [int((cumulative < top_p + slack).sum()) + 1 for slack in (-ROUNDING, ROUNDING)]
    return [
        sorted(order[:length].tolist())
        for length in {min(length, tall, len(after_top_k)) for length in lengths}
    ]


def kept_set(logits: np.ndarray, temperature: float, *cut: float) -> list[int]:
    z = torch.from_numpy(logits.astype(np.float32)[None]) / temperature
    z = z - z.max()
    sets = KeptSets.of_cuts(z, z.exp().sum(-1, dtype=torch.float64), cuts_of(cut))  # type: ignore[arg-type]
    beyond = sets.beyond(z)
    on_device = FixedKeptSets.of_cuts(z, z.exp().sum(-1, dtype=torch.float64), cuts_of(cut))
    assert torch.equal(on_device.counts, sets.counts) and torch.equal(on_device.beyond(z), beyond)
    tokens = (~beyond)[0].nonzero()[:, 0].tolist()
    assert len(tokens) == int(sets.counts[0])
    return tokens


TRUNCATIONS = st.tuples(
    st.sampled_from([0, 2, 3, 40, 10_000]),
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 1e-6]),
    st.sampled_from([0.0, 0.02, 0.5]),
)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**31), vocabulary=st.sampled_from([2, 7, 100, 129, 257, 2500]),
    temperature=st.sampled_from([0.3, 1.0, 1.5]),
    spread=st.sampled_from([0.0, 0.1, 3.0, 12.0]), step=st.sampled_from([0.0, 0.25, 2.0]),
    truncation=TRUNCATIONS,
)  # fmt: skip
def test_the_kept_set_is_the_definition_s_with_ties_to_the_lower_id(
    seed, vocabulary, temperature, spread, step, truncation
):
    logits = np.random.default_rng(seed).normal(0, spread, vocabulary).astype(np.float32)
    if step:  # many equal logits, as bf16 gives
        logits = np.round(logits / step) * np.float32(step)
    kept = kept_set(logits, temperature, *truncation)
    assert kept in reference_sets(logits, temperature, *truncation)
    assert int(np.argmax(logits)) in kept


@pytest.mark.parametrize("spread", [0.5, 4.0])
@pytest.mark.parametrize(
    "truncation",
    [(0, 0.9, 0.0), (50_000, 0.99, 0.0), (30, 1.0, 0.0), (0, 1.0, 0.01), (0, 0.3, 1e-3)],
)
def test_the_kept_set_of_a_vocabulary_of_152k_is_exact(spread, truncation):
    logits = np.random.default_rng(3).normal(0, spread, 151_936).astype(np.float32)
    for values in (logits, torch.from_numpy(logits).bfloat16().float().numpy()):
        assert kept_set(values, 0.7, *truncation) in reference_sets(values, 0.7, *truncation)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31), vocabulary=st.sampled_from([7, 300, 3000]),
    temperature=st.sampled_from([0.7, 1.0]),
    uniform=st.floats(1e-9, 1 - 1e-9), truncation=TRUNCATIONS,
)  # fmt: skip
def test_token_log_prob_and_entropy_are_those_of_the_renormalized_distribution(
    seed, vocabulary, temperature, uniform, truncation
):
    logits = np.random.default_rng(seed).normal(0, 3, vocabulary).astype(np.float32)
    z, cuts = torch.from_numpy(logits)[None], cuts_of(truncation)
    drawn = draws_of(z, np.float32([temperature]), np.array([uniform]), cuts)
    kept = kept_set(logits, temperature, *truncation)
    z = logits[kept].astype(np.float64) / temperature
    logp = z - z.max() - np.log(np.exp(z - z.max()).sum())
    place = kept.index(int(drawn.tokens[0]))
    cdf = np.cumsum(np.exp(logp))
    assert (cdf[place - 1] if place else 0.0) - 1e-6 <= uniform <= cdf[place] + 1e-6
    assert drawn.logprobs[0] == pytest.approx(logp[place], abs=2e-5)
    assert drawn.entropies[0] == pytest.approx(-(np.exp(logp) * logp).sum(), abs=2e-5)
    assert drawn.kept[0] == len(kept)


def test_a_token_that_is_cut_off_is_never_drawn_and_the_others_have_their_share():
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, -1.0]]).expand(4000, -1)
    uniforms = (np.arange(4000) + 0.5) / 4000
    drawn = draws_of(logits, np.ones(4000, np.float32), uniforms, cuts_of(*[(3, 1.0, 0.0)] * 4000))
    share = np.exp([3.0, 2.0, 3.0])
    assert np.bincount(drawn.tokens, minlength=5).tolist() == pytest.approx(
        [0, *(4000 * share / share.sum()), 0], abs=1.01
    )


def test_rows_without_a_cut_are_drawn_as_they_were_beside_rows_with_one():
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 3, (6, 900)).astype(np.float32))
    temperatures, uniforms = np.full(6, 0.9, np.float32), np.random.default_rng(2).random(6)
    plain = draws_of(logits, temperatures, uniforms)
    cuts = cuts_of(OFF, (0, 0.5, 0.0), OFF, (2, 1.0, 0.0), OFF, (0, 1.0, 0.3))
    mixed = draws_of(logits, temperatures, uniforms, cuts)
    for name in ("tokens", "logprobs", "entropies"):
        assert (getattr(plain, name)[::2] == getattr(mixed, name)[::2]).all()
        assert (getattr(plain, name)[1::2] != getattr(mixed, name)[1::2]).any()
    assert (plain.kept == 0).all() and (mixed.kept[::2] == 900).all()


def test_a_truncated_row_does_not_depend_on_the_rows_beside_it():
    """Kept sets of 1 to some thousand tokens, so that rows are decided at different looks."""
    logits = (
        torch.from_numpy(np.random.default_rng(1).normal(0, 1, (60, 9000)).astype(np.float32))
        * torch.linspace(0.1, 8, 60)[:, None]
    )
    temperatures, uniforms = np.full(60, 0.9, np.float32), np.random.default_rng(2).random(60)
    rows = cuts_of(*[(0, 0.9, 0.0), (5000, 0.99, 1e-4), OFF] * 20)
    together = draws_of(logits, temperatures, uniforms, rows)
    assert together.kept.min() < 128 < 2048 < together.kept[np.arange(60) % 3 < 2].max()
    for row in range(0, 60, 7):
        one = slice(row, row + 1)
        alone = draws_of(logits[one], temperatures[one], uniforms[one], rows(one))
        for name in ("tokens", "logprobs", "kept"):
            assert getattr(together, name)[row] == getattr(alone, name)[0]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_show_in_the_log_prob_of_a_truncated_row(bad):
    logits = torch.randn(2, 300)
    logits[1, 280] = bad
    cuts = cuts_of(*[(50, 0.9, 0.01)] * 2)
    drawn = draws_of(logits, np.ones(2, np.float32), np.array([0.3, 0.3]), cuts)
    assert np.isfinite(drawn.logprobs[0]) and not np.isfinite(drawn.logprobs[1])


def test_tokens_of_probability_zero_are_not_drawn_where_top_k_reaches_them():
    logits = torch.full((1, 700), -torch.inf)
    logits[0, [300, 520]] = torch.tensor([0.0, 1.0])
    drawn = draws_of(logits, np.ones(1, np.float32), np.array([0.999999]), cuts_of((50, 1.0, 0.0)))
    assert drawn.tokens[0] == 520 and np.isfinite([drawn.logprobs[0], drawn.entropies[0]]).all()


def test_running_sums_by_products_are_those_of_the_definition(monkeypatch):
    """Of 152k terms, as kept sets need them where a device's own sums are not deterministic."""
    x = torch.from_numpy(np.random.default_rng(4).random((2, 151_936)) ** 8)
    expected = truncation.running_sums(x)
    monkeypatch.setattr(truncation, "BY_PRODUCT", {"cpu"})
    found = truncation.running_sums(x)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    assert (found.diff(dim=-1) >= 0).all()

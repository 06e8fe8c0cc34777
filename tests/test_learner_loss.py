"""Losses as pure functions: normalization, clips, corrections and estimators."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from golden import CLAMP, token_weights, whole_batch_loss
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_reference import dppo_objective, gmpo_objective, sapo_objective

from retrain.backends.local.loss import (
    KLEstimator,
    cispo_weight,
    clip_counts,
    clipped_terms,
    correction_weight,
    gspo_ratio,
    kl_term,
    policy_loss,
)
from retrain.backends.losses import ActionTokens
from retrain.backends.rows import sequence_weights
from retrain.config.schema import Loss

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=8)


@given(LENGTHS)
def test_token_mean_gives_every_token_the_same_weight(lengths: list[int]) -> None:
    weights = token_weights(lengths, "token_mean")
    assert len(weights) == sum(lengths)
    assert weights.sum().item() == pytest.approx(1 if sum(lengths) else 0)
    assert len(set(weights.tolist())) <= 1


@given(LENGTHS)
def test_sequence_mean_gives_every_sequence_with_tokens_the_same_weight(lengths: list[int]) -> None:
    per_sequence = [
        weight * length
        for weight, length in zip(sequence_weights(lengths, "sequence_mean"), lengths, strict=True)
    ]
    filled = [total for total, length in zip(per_sequence, lengths, strict=True) if length]
    assert filled == pytest.approx([1 / len(filled)] * len(filled) if filled else [])


@given(LENGTHS, st.integers(1, 100))
def test_constant_divides_by_sequences_times_max_tokens(
    lengths: list[int], max_tokens: int
) -> None:
    assert sequence_weights(lengths, "constant", max_tokens) == [
        1 / (len(lengths) * max_tokens)
    ] * len(lengths)
    assert sequence_weights(lengths, "constant", max_tokens, completions=40) == [
        1 / (40 * max_tokens)
    ] * len(lengths)


def test_constant_without_max_tokens_is_an_error() -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        sequence_weights([3], "constant", 0)


@pytest.mark.parametrize(
    ("estimator", "divergence"),
    [("k1", None), ("k2", "KL(policy || base)"), ("k3", "KL(base || policy)")],
)
def test_the_expected_gradient_of_each_kl_term_is_that_of_its_divergence(
    estimator: KLEstimator, divergence: str | None
) -> None:
    """Over all tokens of a small vocabulary, each weighed by the policy that draws it."""
    draw = torch.Generator().manual_seed(4)
    logits = torch.randn(7, generator=draw, dtype=torch.float64).requires_grad_()
    policy, base = (
        logits.log_softmax(0),
        torch.randn(7, generator=draw, dtype=torch.float64).log_softmax(0),
    )
    (found,) = torch.autograd.grad(
        (policy.detach().exp() * kl_term(policy, base, estimator, CLAMP)).sum(),
        logits,
        retain_graph=True,
    )
    exact = {
        "KL(policy || base)": (policy.exp() * (policy - base)).sum(),
        "KL(base || policy)": (base.exp() * (base - policy)).sum(),
        None: 0.0 * policy.sum(),
    }
    (wanted,) = torch.autograd.grad(exact[divergence], logits)
    torch.testing.assert_close(found, wanted)


CLIPS = {
    "importance_sampling": ({}, [True, False, False, False, False]),
    "ppo": ({"clip_low": 0.2, "clip_high": 0.2}, [True, False, True, False, False]),
    "ppo, dual clip": (
        {"mode": "ppo", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 1.5},
        [True, True, True, False, False],
    ),
    "cispo": ({"clip_high": 1.5}, [True, True, False, False, False]),
    "sapo": ({}, [True, False, False, False, False]),
    "gmpo": ({}, [True, False, True, False, False]),
}


@pytest.mark.parametrize("name", CLIPS)
def test_the_clip_counts_the_tokens_that_lost_their_gradient(name: str) -> None:
    """Log-ratios 25 (beyond the clamp), 0.5, -0.5, 0 and, without an advantage, 1; in cispo the
    weight is bounded instead.
    """
    settings, expected = CLIPS[name]
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0, 0.0], dtype=torch.float64)
    old, weights = torch.zeros(5, dtype=torch.float64), torch.full((5,), 0.2, dtype=torch.float64)
    new = torch.tensor([25.0, 0.5, -0.5, 0.0, 1.0], dtype=torch.float64, requires_grad=True)
    tokens = ActionTokens(new, old, old, advantages, weights, [2, 3])
    chosen = Loss(**{"mode": name, **settings})
    policy_loss(tokens, chosen).backward()
    assert new.grad is not None
    if chosen.mode != "cispo":
        assert ((new.grad == 0) & (advantages != 0)).tolist() == expected
    assert clip_counts(tokens, chosen).tolist() == [sum(expected), 4]


def test_gspo_counts_sequences() -> None:
    """The last one's ratio is above the clip, which takes the gradient of one of its two tokens
    with an advantage.
    """
    lengths, old = [2, 3, 1, 1, 3], torch.zeros(10)
    new = torch.tensor([0.1, 0.1, 0.1, -0.1, 0.0, -0.5, 0.3, 0.2, 0.2, 0.2])
    advantages = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, -1.0, 0.0, 1.0, -1.0, 0.0])
    tokens = ActionTokens(new, old, old, advantages, torch.ones(10), lengths)
    assert clip_counts(tokens, Loss(mode="gspo", clip_low=0.01, clip_high=0.01)).tolist() == [
        2.5,
        4,
    ]


@settings(deadline=None)  # the first backward pass of a process takes its time
@given(LENGTHS.filter(lambda lengths: sum(lengths) > 0), st.integers(0, 999))
def test_on_policy_all_modes_have_the_gradient_of_reinforce(lengths: list[int], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    old = -torch.rand(sum(lengths), generator=draw, dtype=torch.float64) - 0.1
    advantages = torch.randn(sum(lengths), generator=draw, dtype=torch.float64)
    weights = token_weights(lengths, "token_mean")
    for chosen in (
        Loss(),
        Loss(mode="ppo", clip_low=0.2, clip_high=0.2),
        Loss(mode="gspo", clip_low=3e-4, clip_high=4e-4),
        Loss(mode="cispo", clip_high=4.0),
        Loss(mode="sapo"),
        Loss(mode="gmpo"),
        Loss(mode="dppo"),
    ):
        new = old.clone().requires_grad_()
        policy_loss(ActionTokens(new, old, old, advantages, weights, lengths), chosen).backward()
        torch.testing.assert_close(new.grad, -advantages * weights)


def test_ppo_cuts_the_gradient_only_beyond_the_clip_in_the_advantages_direction() -> None:
    new = torch.tensor(
        [0.5, 0.5, -0.5, -0.5], dtype=torch.float64, requires_grad=True
    )  # ratios e^0.5 = 1.65 and e^-0.5 = 0.61
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    clipped_terms(new.exp(), advantages, 0.2, 0.2).sum().backward()
    assert new.grad is not None
    assert (new.grad != 0).tolist() == [False, True, True, False]


def test_dual_clip_bounds_the_loss_of_a_negative_advantage() -> None:
    ratios, advantages = torch.tensor([10.0, 10.0]), torch.tensor([-2.0, 2.0])
    assert clipped_terms(ratios, advantages, 0.2, 0.2, dual_clip=3.0).tolist() == pytest.approx(
        [6.0, -2.4]
    )


def test_gspo_ratio_is_the_geometric_mean_of_each_sequence() -> None:
    new = torch.tensor([-1.0, -2.0, -0.5, -3.0], dtype=torch.float64)
    old = torch.tensor([-1.5, -1.0, -0.5, -1.0], dtype=torch.float64)
    assert gspo_ratio(new, old, [3, 0, 1], CLAMP).tolist() == pytest.approx(
        [math.exp(-0.5 / 3), 1.0, math.exp(-2)]
    )


def test_weights_of_corrections_are_clipped_dropped_and_carry_no_gradient() -> None:
    train = torch.tensor([0.0, 1.0, -1.0, 3.0], requires_grad=True)
    sampler = torch.zeros(4)
    tokens = ActionTokens(sampler, train, sampler, sampler, sampler, [4])
    found = [
        correction_weight(tokens, Loss(correction="tis", correction_cap=2.0)),
        correction_weight(
            tokens, Loss(correction="icepop", correction_low=0.5, correction_high=5.0)
        ),
        cispo_weight(train, sampler, 0.5, 4.0, CLAMP),
    ]
    expected = [[1, 2, math.exp(-1), 2], [1, math.e, 0, 0], [1, math.e, 0.5, 4]]
    for weight, values in zip(found, expected, strict=True):
        assert weight is not None and not weight.requires_grad
        assert weight.tolist() == pytest.approx(values)


@given(st.floats(-5, 0), st.floats(-5, 0))
def test_k2_and_k3_are_never_negative_and_zero_on_policy(new: float, reference: float) -> None:
    a, b = torch.tensor([new], dtype=torch.float64), torch.tensor([reference], dtype=torch.float64)
    assert kl_term(a, b, "k2", CLAMP).item() >= 0
    assert kl_term(a, b, "k3", CLAMP).item() >= -1e-15
    assert (
        kl_term(a, a, "k1", CLAMP).item()
        == kl_term(a, a, "k2", CLAMP).item()
        == kl_term(a, a, "k3", CLAMP).item()
        == 0
    )


def test_a_huge_mismatch_cannot_overflow() -> None:
    new, old = torch.tensor([0.0]), torch.tensor([-1000.0])
    assert whole_batch_loss(new, old, torch.tensor([1.0]), [1]).item() == pytest.approx(
        -math.exp(20), rel=1e-5
    )


def test_whole_batch_losses_give_the_golden_numbers() -> None:
    new = torch.tensor([-0.5, -1.0, -2.0, -0.1, -0.3], dtype=torch.float64)
    old = torch.tensor([-0.6, -1.0, -1.0, -0.1, -0.9], dtype=torch.float64)
    advantages = torch.tensor([1.0, 0.5, 1.0, -1.0, -0.5], dtype=torch.float64)
    assert whole_batch_loss(new, old, advantages, [3, 2], 10).item() == pytest.approx(
        -0.012398191810367092, rel=1e-12
    )
    assert whole_batch_loss(new, old, advantages, [3, 2], mode="ppo").item() == pytest.approx(
        -0.012398191810367092, rel=1e-12
    )


# --- losses from papers ---------------------------------------------------------------------------

OBJECTIVES: dict[str, tuple[Callable[..., torch.Tensor], tuple[float, ...], dict[str, Any]]] = {
    "sapo": (sapo_objective, (1.0, 1.05), {"aggregation": "sequence_mean"}),
    "sapo, other tau": (
        sapo_objective,
        (0.5, 3.0),
        {"params": {"tau_pos": 0.5, "tau_neg": 3.0}, "aggregation": "sequence_mean"},
    ),
    "gmpo": (gmpo_objective, (0.4, 0.4), {"aggregation": "sequence_mean"}),
    "gmpo, narrow": (
        gmpo_objective,
        (0.05, 0.1),
        {"clip_low": 0.05, "clip_high": 0.1, "aggregation": "sequence_mean"},
    ),
    "dppo": (dppo_objective, (0.15, 0.15, 20.0), {}),
    "dppo, narrow": (
        dppo_objective,
        (0.02, 0.03, 1.1),
        {"clip_low": 0.02, "clip_high": 0.03, "params": {"cap": 1.1}},
    ),
}


def off_policy_batch() -> tuple[torch.Tensor, torch.Tensor, list[float], list[int]]:
    """(new, old, an advantage for each sequence, lengths), every clip acting on some tokens."""
    draw = torch.Generator().manual_seed(2)
    lengths, advantages = [5, 1, 7, 4], [1.3, -0.7, -2.0, 0.4]
    old = -torch.rand(sum(lengths), generator=draw, dtype=torch.float64) * 2 - 0.05
    new = (old + 0.6 * torch.randn(sum(lengths), generator=draw, dtype=torch.float64)).clamp(
        max=-0.01
    )
    return new.requires_grad_(), old, advantages, lengths


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_loss_from_a_paper_has_its_objectives_value_and_gradient(name: str) -> None:
    objective, arguments, loss = OBJECTIVES[name]
    new, old, advantages, lengths = off_policy_batch()
    per_token = torch.tensor(
        [a for a, length in zip(advantages, lengths, strict=True) for _ in range(length)],
        dtype=torch.float64,
    )
    ours = whole_batch_loss(new, old, per_token, lengths, mode=name.partition(",")[0], **loss)
    theirs = -objective(
        list(zip(new.split(lengths), old.split(lengths), advantages, strict=True)), *arguments
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(
        *(torch.autograd.grad(loss, new)[0] for loss in (ours, theirs)), rtol=1e-10, atol=1e-14
    )


def test_the_corrections_of_whole_completions_truncate_drop_and_ignore_the_length() -> None:
    """Ratios e^0.3 * e^0.5 = 2.2, e^-1.2 = 0.3, and four times e^0.4 = 4.95; the first and the last
    have one geometric mean, 1.492.
    """
    train = torch.tensor(
        [0.3, 0.5, -1.2, 0.4, 0.4, 0.4, 0.4], dtype=torch.float64, requires_grad=True
    )
    zeros = torch.zeros(7, dtype=torch.float64)
    tokens = ActionTokens(zeros, train, zeros, zeros, zeros, [2, 1, 4])

    def weights(**loss: Any) -> list[float]:
        found = correction_weight(tokens, Loss(**loss))
        assert found is not None and not found.requires_grad
        return [found[0].item(), found[2].item(), found[3].item()]

    first, second, third = math.exp(0.8), math.exp(-1.2), math.exp(1.6)
    assert weights(correction="seq_tis") == pytest.approx([2, second, 2])
    assert weights(correction="seq_mask") == pytest.approx([first, 0, third])
    assert weights(correction="seq_mask", correction_low=0.0, correction_high=2.5) == pytest.approx(
        [first, second, 0]
    )
    assert weights(correction="geometric", correction_low=0.5, correction_high=1.5) == [1, 0, 1]
    assert weights(correction="geometric", correction_low=0.2, correction_high=1.49) == [0, 1, 0]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=8))
def test_prompt_mean_weighs_prompts_alike_and_each_prompts_tokens_alike(
    sequences: list[tuple[int, int]],
) -> None:
    lengths, groups = [length for length, _ in sequences], [group for _, group in sequences]
    weights = sequence_weights(lengths, "prompt_mean", groups=groups)
    of_prompt = {
        group: [
            (w, n) for w, n, g in zip(weights, lengths, groups, strict=True) if g == group and n
        ]
        for group in groups
    }
    shares = [sum(w * n for w, n in parts) for parts in of_prompt.values() if parts]
    assert shares == pytest.approx([1 / len(shares)] * len(shares) if shares else [])
    assert all(len({w for w, _ in parts}) <= 1 for parts in of_prompt.values())


def test_no_tokens_is_no_loss() -> None:
    empty = torch.empty(0, dtype=torch.float64)
    assert whole_batch_loss(empty, empty, empty, []).item() == 0

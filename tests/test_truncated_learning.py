"""A truncated policy is trained as it was sampled: over the kept tokens, whatever the rounding,
with the gradient of the formulas.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_reference import reference_loss, row_scores

from retrain.backends.local.backend import LocalBackend
from retrain.backends.rows import check_rows
from retrain.inference_engine.base import NoiseKey, SampleRequest, Truncation
from retrain.model.head import Head, score_tokens
from retrain.model.truncation import keep_only
from retrain.types import Row
from tests.decoding import cuts_of, draws_of
from tests.learner_models import (
    VOCABULARY,
    config_for,
    distance,
    gradients,
    make_learner,
    make_rows,
    with_logprobs,
)
from tests.marks import first_of

# -- the head --------------------------------------------------------------------------------------


def full_head(
    head: Head, hidden: torch.Tensor, targets: torch.Tensor, kept: torch.Tensor, temperature: float
) -> list[torch.Tensor]:
    """Log-probs and entropies in float64 through autograd, one token after the other."""
    logprobs, entropies = [], []
    for state, target, count in zip(hidden, targets.tolist(), kept.tolist(), strict=True):
        logits = head.weight.double() @ state * head.scale
        if head.softcap is not None:
            logits = head.softcap * torch.tanh(logits / head.softcap)
        others = [
            token for token in torch.argsort(logits, descending=True).tolist() if token != target
        ]
        distribution = torch.log_softmax((logits / temperature)[[target, *others[: count - 1]]], -1)
        logprobs.append(distribution[0])
        entropies.append(-(distribution.exp() * distribution).sum())
    return [torch.stack(logprobs), torch.stack(entropies)]


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 23),
    rows_per_chunk=st.integers(1, 9),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.5]),
    softcap=st.sampled_from([None, 2.0]),
    vocabulary=st.sampled_from([37, 200]),
    most=st.sampled_from([1, 3, 250]),
    seed=st.integers(0, 2**16),
)
def test_the_chunked_head_over_kept_tokens_equals_float64(
    tokens: int,
    rows_per_chunk: int,
    temperature: float,
    softcap: float | None,
    vocabulary: int,
    most: int,
    seed: int,
) -> None:
    noise = torch.Generator().manual_seed(seed)
    head = Head(torch.randn(vocabulary, 8, generator=noise), None, 1.5, softcap)
    hidden = torch.randn(tokens, 8, generator=noise)
    targets = torch.randint(0, vocabulary, (tokens,), generator=noise)
    kept = torch.randint(1, most + 1, (tokens,), generator=noise)
    factors = torch.randn(2, tokens, generator=noise)

    ours = hidden.clone().requires_grad_()
    chunks: Any = {"entropy": True, "chunk_bytes": 4 * vocabulary * rows_per_chunk}
    scores = score_tokens(head, ours, targets, temperature, kept=kept, **chunks)
    assert scores.entropies is not None and ours.grad is None
    (factors[0] * scores.logprobs + factors[1] * scores.entropies).sum().backward()

    theirs = hidden.double().requires_grad_()
    logprobs, entropies = full_head(head, theirs, targets, kept, temperature)
    (factors[0] * logprobs + factors[1] * entropies).sum().backward()

    assert ours.grad is not None and theirs.grad is not None
    torch.testing.assert_close(scores.logprobs.double(), logprobs, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(scores.entropies.double(), entropies, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        ours.grad.double(), theirs.grad, atol=1e-3 * float(theirs.grad.abs().max() + 1), rtol=1e-3
    )


def test_a_count_that_reaches_the_whole_vocabulary_changes_no_byte() -> None:
    head, hidden, targets = Head(torch.randn(61, 8)), torch.randn(9, 8), torch.arange(9)
    plain = score_tokens(head, hidden, targets, 0.7, entropy=True)
    counted = score_tokens(
        head, hidden, targets, 0.7, kept=torch.tensor([61, 10**12] * 4 + [2**63 - 1]), entropy=True
    )
    assert torch.equal(plain.logprobs, counted.logprobs)
    assert plain.entropies is not None
    assert counted.entropies is not None
    assert torch.equal(plain.entropies, counted.entropies)


# -- another rounding, another policy --------------------------------------------------------------


def sampled(
    z: torch.Tensor, top_k: int, top_p: float, min_p: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, log-probs and kept counts of one draw from every row."""
    rows = len(z)
    cuts = cuts_of(*[(top_k, top_p, min_p)] * rows)
    drawn = draws_of(z, np.ones(rows, np.float32), np.random.default_rng(0).random(rows), cuts)
    return tuple(map(torch.from_numpy, (drawn.tokens, drawn.logprobs, drawn.kept)))


def learned(z: torch.Tensor, tokens: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    logprobs = torch.log_softmax(keep_only(z.clone(), tokens, kept), -1)
    return logprobs.gather(-1, tokens[:, None])[:, 0]


CUTS = [(0, 0.9, 0.0), (20, 1.0, 0.0), (0, 1.0, 0.1), (50, 0.7, 0.01)]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("spread", [0.3, 2.0, 6.0])
@pytest.mark.parametrize("rounding", ["1e-5", "0.05", "bf16"])
def test_rounding_moves_a_truncated_log_prob_at_most_twice_as_far_as_a_logit(
    rounding, spread, cut
) -> None:
    noise = torch.Generator().manual_seed(7)
    z = torch.randn(100, 1000, generator=noise) * spread
    other = (
        z.bfloat16().float()
        if rounding == "bf16"
        else z + float(rounding) * (2 * torch.rand(z.shape, generator=noise) - 1)
    )
    tokens, logprobs, kept = sampled(z, *cut)
    moved = (other - z).abs().amax(-1)
    assert ((learned(other, tokens, kept) - logprobs).abs() <= 2 * moved + 1e-5).all()


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_the_count_stands_for_the_sampler_s_own_set_better_than_a_threshold_would(
    cut: tuple[int, float, float],
) -> None:
    """Tokens near a threshold come and go under rounding, each with all of its probability; a count
    only exchanges near-equal ones.
    """
    noise = torch.Generator().manual_seed(7)
    z = 4 * torch.randn(400, 1000, generator=noise)
    other = z.bfloat16().float()
    tokens, _, kept = sampled(z, *cut)
    own = keep_only(z.clone(), tokens, kept).isfinite()
    last = z.masked_fill(~own, torch.inf).amin(-1, keepdim=True)
    below = other < last
    below.scatter_(-1, tokens[:, None], False)

    def logprobs(removed: torch.Tensor) -> torch.Tensor:
        of_all = torch.log_softmax(other.masked_fill(removed, -torch.inf), -1)
        return of_all.gather(-1, tokens[:, None])[:, 0]

    by_count, by_threshold = (
        (values - logprobs(~own)).abs().mean()
        for values in (learned(other, tokens, kept), logprobs(below))
    )
    assert by_count < 1e-4 and by_threshold > 10 * by_count


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**31), drift=st.sampled_from([0.1, 2.0, 200.0]), cut=st.sampled_from(CUTS)
)
def test_the_sampled_token_stays_in_its_set_however_far_the_policy_has_moved(
    seed, drift, cut
) -> None:
    noise = torch.Generator().manual_seed(seed)
    z = 3 * torch.randn(8, 200, generator=noise)
    moved = z + drift * torch.randn(z.shape, generator=noise)
    tokens, _, kept = sampled(z, *cut)
    only = keep_only(moved.clone(), tokens, kept)
    assert only.isfinite().sum(-1).tolist() == kept.tolist()
    hidden = moved.clone().requires_grad_()
    scores = score_tokens(Head(torch.eye(200)), hidden, tokens, 1.0, kept=kept)
    scores.logprobs.sum().backward()
    assert scores.logprobs.isfinite().all() and (scores.logprobs <= 1e-6).all()
    assert hidden.grad is not None and hidden.grad.isfinite().all()


# -- the learner -----------------------------------------------------------------------------------

LOSSES: list[dict[str, Any]] = [
    {},
    {"mode": "ppo"},
    {"mode": "cispo"},
    {"old_logprobs": "recomputed", "correction": "tis"},
    {"kl_coef": 0.3, "kl_estimator": "k2"},
    {"kl_coef": 0.3, "kl_estimator": "k3"},
    {"entropy_coef": 0.2},
]


def truncated_rows() -> list[Row]:
    """Kept sets from one token to all; one row of the batch is not truncated."""
    rng = np.random.default_rng(4)
    rows = [
        replace(row, kept=rng.choice([1, 2, 5, 20, VOCABULARY], row.num_actions).astype(np.int32))
        for row in make_rows()
    ]
    return [*rows[:-1], replace(rows[-1], kept=None)]


@pytest.mark.parametrize("budget", first_of([1, 4096]), ids=["one row", "all"])
@pytest.mark.parametrize(
    "loss", LOSSES, ids=lambda loss: "-".join(map(str, loss.values())) or "plain"
)
def test_the_gradient_over_kept_tokens_equals_the_written_out_loss(
    loss: dict[str, Any], budget: int
) -> None:
    learner = make_learner(config_for(loss=loss), budget)
    rows = truncated_rows()
    noisy = with_logprobs(rows, learner.logprobs(rows), noise=0.3)
    rows = [replace(one, kept=row.kept) for one, row in zip(noisy, rows, strict=True)]
    result = learner.train(rows, 0)
    ours = gradients(learner)

    model = learner.weights.peft_model
    with torch.no_grad():
        with model.disable_adapter():  # the base is not truncated
            whole = [replace(row, kept=None) for row in rows]
            frozen = [list(map(float, row_scores(model, row, 0.7)[0])) for row in whole]
        own = [list(map(float, row_scores(model, row, 0.7)[0])) for row in rows]
    old = own if "old_logprobs" in loss else [row.logprobs.tolist() for row in rows]
    bounds = {"ppo": {"low": 0.2, "high": 0.2}, "cispo": {"low": 0.0, "high": 4.0}}
    clips = bounds.get(loss.get("mode", ""), {})
    settings = {name: value for name, value in loss.items() if name != "old_logprobs"} | clips
    learner.optimizer.zero_gradients()
    theirs = reference_loss(model, rows, old, frozen, temperature=0.7, **settings)
    theirs.backward()
    assert result.loss == pytest.approx(theirs.item(), rel=5e-5, abs=1e-5)
    assert distance(ours, gradients(learner)) < 1e-5


def test_the_kl_against_the_whole_base_has_the_gradient_over_the_kept_set() -> None:
    """Expected over the truncated policy in float64: k2's is exact, k3's is that of the reverse KL
    times the base's mass of the set.
    """
    noise = torch.Generator().manual_seed(3)
    z = torch.randn(6, dtype=torch.float64, generator=noise).requires_grad_()  # of the kept tokens
    base = torch.log_softmax(torch.randn(9, dtype=torch.float64, generator=noise), -1)[
        :6
    ]  # the same tokens, of a vocabulary of nine
    policy, within = torch.log_softmax(z, -1), torch.log_softmax(base, -1)
    (forward,) = torch.autograd.grad((policy.exp() * (policy - within)).sum(), z, retain_graph=True)
    (reverse,) = torch.autograd.grad((within.exp() * (within - policy)).sum(), z, retain_graph=True)
    weights, d = policy.exp().detach(), policy - base
    (k2,) = torch.autograd.grad((weights * d.square() / 2).sum(), z, retain_graph=True)
    (k3,) = torch.autograd.grad((weights * (torch.exp(-d) - 1 + d)).sum(), z)
    torch.testing.assert_close(k2, forward)
    torch.testing.assert_close(k3, base.exp().sum() * reverse)


def test_kept_counts_that_do_not_fit_a_row_are_refused() -> None:
    row = make_rows(1)[0]
    for counts in (np.ones(row.num_actions + 1, np.int32), np.zeros(row.num_actions, np.int32)):
        with pytest.raises(ValueError, match=r"row 0: .* kept counts of 1 or more"):
            check_rows([replace(row, kept=counts)])


# -- engine and learner ----------------------------------------------------------------------------

TRUNCATIONS = [Truncation(top_p=0.8), Truncation(top_k=5), Truncation(min_p=0.1)]
TRUNCATIONS += [Truncation(20, 0.9, 0.02)]


def rows_of(backend: LocalBackend, truncation: Truncation, step: int) -> list[Row]:
    prompts = [np.arange(4 + slot, 12 + 2 * slot, dtype=np.int32) % VOCABULARY for slot in range(3)]
    requests = [
        SampleRequest(ids, 2, 24, 0.7, NoiseKey(1, 0, step, slot), truncation=truncation)
        for slot, ids in enumerate(prompts)
    ]
    rows = []
    for done in backend.engine.sample(requests):
        prompt = prompts[done.request]
        span = (len(prompt), len(prompt) + len(done.token_ids))
        advantages = np.full(len(done.token_ids), 1 - 2 * done.sample, np.float32)
        ids = np.concatenate([prompt, done.token_ids])
        rows.append(Row(ids, (span,), done.logprobs, advantages, done.request, kept=done.kept))
    return rows


@pytest.mark.parametrize("old", first_of(["sampler", "recomputed"]))
@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_a_truncated_policy_has_ratio_one_before_and_after_an_update(
    truncation: Truncation, old: str
) -> None:
    config = config_for(training={"lr": 0.05}, loss={"old_logprobs": old})
    backend = LocalBackend(config, eos_ids=[3])
    for step in range(2):
        rows = rows_of(backend, truncation, step)
        kept = np.concatenate([row.kept for row in rows if row.kept is not None])
        assert len(kept) == sum(row.num_actions for row in rows)
        assert 1 < kept.mean() < VOCABULARY / 2
        result = backend.train(rows, step)
        assert result.ratio_max == pytest.approx(1, abs=1e-4)
        assert result.updates == 1


def test_without_the_kept_sets_the_ratio_of_a_truncated_sample_is_below_one() -> None:
    """The field's fault that the counts are there against."""
    backend = LocalBackend(config_for(), eos_ids=[3])
    rows = [replace(row, kept=None) for row in rows_of(backend, Truncation(top_p=0.8), 0)]
    ratio = backend.train(rows, 0).ratio_mean
    assert ratio is not None and ratio < 0.95


def test_in_bf16_engine_and_learner_stay_within_the_gate_of_half_precision() -> None:
    backend = LocalBackend(config_for(model={"dtype": "bf16"}), eos_ids=[3])
    rows = [row for cut in TRUNCATIONS for step in range(4) for row in rows_of(backend, cut, step)]
    sampled = np.concatenate([row.logprobs for row in rows])
    differences = np.abs(np.concatenate(backend.logprobs(rows)) - sampled)
    assert differences.mean() < 0.02 and differences.max() < 0.5


def test_a_request_without_truncation_and_a_greedy_one_carry_no_counts() -> None:
    backend = LocalBackend(config_for(), eos_ids=[3])
    assert all(row.kept is None for row in rows_of(backend, Truncation(), 0))
    ids, cut = np.arange(4, 9, dtype=np.int32), Truncation(top_p=0.5)
    greedy = SampleRequest(ids, 1, 8, 0.0, NoiseKey(1, 0, 0, 0), truncation=cut)
    assert [done.kept for done in backend.engine.sample([greedy])] == [None]


def test_truncated_and_whole_requests_share_a_batch_without_changing_each_other() -> None:
    backend = LocalBackend(config_for(), eos_ids=[3])
    requests = []
    for slot, cut in enumerate([Truncation(), Truncation(top_p=0.8), Truncation(top_k=2)]):
        ids, key = np.arange(4, 9 + slot, dtype=np.int32), NoiseKey(1, 0, 0, slot)
        requests.append(SampleRequest(ids, 2, 12 + 3 * slot, 0.7, key, truncation=cut))
    together = {(done.request, done.sample): done for done in backend.engine.sample(requests)}
    for slot, request in enumerate(requests):
        for done in backend.engine.sample([request]):
            other = together[slot, done.sample]
            assert done.token_ids.tolist() == other.token_ids.tolist()
            assert (done.kept is None) == (other.kept is None) == (slot == 0)
            if done.kept is not None and other.kept is not None:
                assert done.kept.tolist() == other.kept.tolist()

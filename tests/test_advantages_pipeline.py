"""From scored groups to token advantages: the order of the stages, and what holds for every
condition.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from golden import gtpo
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.advantages.credit import Credit
from retrain.advantages.pipeline import CreditPipeline
from retrain.advantages.step import Float64Array, Segments, StepTokens, flatten
from retrain.advantages.transforms import (
    TRANSFORMS,
    gtpo_group_weights,
    gtpo_weights,
    hicra,
    inverted,
    kept_count,
    sepa_amplify,
    sepa_amplify_clamped,
    sepa_pool,
)
from retrain.config import TrainConfig
from retrain.config.names import builtin_names, recipe_names
from retrain.config.recipes import RECIPES
from retrain.errors import ConfigurationError, RunFailed
from retrain.types import (
    Completion,
    Example,
    FinishReason,
    Float32Array,
    Group,
    Int32Array,
    Prompt,
    Score,
    Scored,
    Trajectory,
)

# Token ids stand for these pieces.
VOCABULARY = ["so ", "let ", "me ", "check ", "x", ""]


def pieces(token_ids: Int32Array) -> list[str]:
    return [VOCABULARY[token] for token in token_ids]


def config(
    transform: str = "gtpo_sepa", advantage: str = "maxrl", **sections: dict[str, object]
) -> TrainConfig:
    algorithm = {
        "transform_mode": transform,
        "advantage_mode": advantage,
        "reference": "base",
        **sections.pop("algorithm", {}),
    }
    return TrainConfig.model_validate({"algorithm": algorithm, **sections})


def completion(
    tokens: list[int], logprobs: list[float], finish: FinishReason = FinishReason.STOP
) -> Completion:
    entropies: Float32Array = np.array([-2 * value for value in logprobs], np.float32)
    return Completion(
        0, 0, np.array(tokens, np.int32), np.array(logprobs, np.float32), entropies, finish
    )


def group(rewards: list[float], completions: list[Completion], threshold: float = 0.5) -> Group:
    prompt = Prompt(Example("q", "a", example_id="q"), "q", np.array([7, 8], np.int32))
    members = [
        Scored(Trajectory.of(replace(one, sample=sample)), "", Score.of(reward, threshold))
        for sample, (one, reward) in enumerate(zip(completions, rewards, strict=True))
    ]
    return Group(prompt, 0, members)


def replies(of: Group) -> list[Completion]:
    return [trajectory.completions[0] for trajectory in of.trajectories]


def without_entropies(of: Group) -> Group:
    bare = [Trajectory.of(replace(one, entropies=None)) for one in replies(of)]
    pairs = zip(of.members, bare, strict=True)
    return replace(of, members=[replace(member, trajectory=one) for member, one in pairs])


def mixed() -> Group:
    right = completion([0, 1, 2, 3, 4], [-0.1, -2.0, -0.3, -1.0, -0.5])
    return group([1.0, 0.0], [right, completion([4, 0], [-1.5, -0.25])])


def assign(configuration: TrainConfig, groups: list[Group], lam: float = 0.5) -> Credit:
    return CreditPipeline(configuration, pieces).assign(groups, 3, lam, taught)


def taught(groups: Sequence[Group]) -> Float64Array:
    """Log-probs by a teacher who is surer of what the policy is sure of."""
    rows = [one.logprobs for group in groups for one in group.trajectories]
    return 0.9 * flatten(rows) - 0.2


def tokens_of(credit: Credit) -> list[list[list[float]]]:
    return [[row.tolist() for row in given.token_advantages] for given in credit.groups]


# -- properties of the stages ----------------------------------------------------------------------

COMPLETIONS = st.lists(
    st.lists(st.tuples(st.floats(0, 50), st.booleans()), max_size=12), min_size=1, max_size=6
)


def arrays(
    completions: list[list[tuple[float, bool]]],
) -> tuple[Float64Array, np.ndarray, Segments]:
    h = flatten([[value for value, _ in row] for row in completions])
    return (
        h,
        np.array([mark for row in completions for _, mark in row], np.bool_),
        Segments(map(len, completions)),
    )


@given(COMPLETIONS, st.floats(0, 1))
def test_gtpo_weights_of_a_completion_sum_to_its_length(
    completions: list[list[tuple[float, bool]]], beta: float
) -> None:
    h, _, segments = arrays(completions)
    weights = gtpo_weights(h, segments, beta)
    assert segments.sums(weights) == pytest.approx(segments.lengths, rel=1e-9, abs=1e-9)
    assert (weights >= 1 - beta - 1e-12).all()


@given(st.floats(0, 50), st.integers(1, 20), st.floats(0, 5))
def test_equal_uncertainty_gives_weights_of_exactly_one(
    value: float, length: int, beta: float
) -> None:
    assert gtpo(2.0, [value] * length, beta) == [2.0] * length


def test_gtpo_edge_cases() -> None:
    assert gtpo(1.0, [], 0.1) == []
    assert gtpo(1.0, [1e-8, 3e-8], 0.5) == [1.0, 1.0], (
        "a completion as good as deterministic is uniform"
    )
    assert gtpo(1.0, [0.0, 2.0], 2.0) == [0.0, 3.0], "above 1 beta clips at 0"
    assert gtpo(1.0, [float("inf"), 50.0], 0.5) == [1.0, 1.0], "the cap comes before the mean"
    for bad in (-0.1, float("nan")):
        with pytest.raises(ValueError, match="beta"):
            gtpo(1.0, [1.0], bad)


@given(COMPLETIONS, st.floats(0, 1))
def test_pooling_and_amplifying_keep_the_mean_of_a_completion(
    completions: list[list[tuple[float, bool]]], lam: float
) -> None:
    h, planning, segments = arrays(completions)
    for change in (sepa_pool, sepa_amplify):
        changed = change(h, planning, segments, lam)
        assert segments.means(changed) == pytest.approx(segments.means(h), rel=1e-9, abs=1e-9)
        assert (changed[planning] == h[planning]).all()


@given(COMPLETIONS)
def test_full_pooling_leaves_one_value_on_execution_tokens(
    completions: list[list[tuple[float, bool]]],
) -> None:
    h, planning, segments = arrays(completions)
    pooled = segments.split(sepa_pool(h, planning, segments, 1.0))
    for row, marks in zip(pooled, segments.split(planning.astype(float)), strict=True):
        assert len(set(row[marks == 0].tolist())) <= 1


def test_lambda_is_clamped_and_zero_changes_nothing() -> None:
    h, planning, segments = np.array([1.0, 3.0]), np.array([False, False]), Segments([2])
    assert sepa_pool(h, planning, segments, 0.0).tolist() == [1.0, 3.0]
    assert sepa_pool(h, planning, segments, 7.0).tolist() == [2.0, 2.0]
    assert sepa_amplify_clamped(h, planning, segments, 1.0).tolist() == [0.0, 4.0]
    with pytest.raises(ValueError, match="NaN"):
        sepa_pool(h, planning, segments, float("nan"))
    with pytest.raises(ValueError, match="1 mask entries for 2"):
        sepa_pool(h, planning[:1], segments, 0.5)


@given(st.lists(st.tuples(st.floats(-10, 10), st.booleans()), max_size=20), st.floats(0, 1))
def test_hicra_raises_planning_tokens_and_never_flips_a_sign(
    tokens: list[tuple[float, bool]], alpha: float
) -> None:
    before, planning = np.array([a for a, _ in tokens]), np.array([m for _, m in tokens], np.bool_)
    after = hicra(before, planning, alpha)
    assert (after[~planning] == before[~planning]).all()
    assert (after >= before).all()
    assert (after * before >= 0).all()


def test_hicra_refuses_what_would_flip_signs() -> None:
    for alpha in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="alpha"):
            hicra(np.ones(1), np.ones(1, np.bool_), alpha)
    with pytest.raises(ValueError, match="2 mask entries for 1"):
        hicra(np.ones(1), np.ones(2, np.bool_), 0.1)


def test_group_norm_compares_the_same_position_among_the_same_sign() -> None:
    segments, h = Segments([2, 1, 2]), np.array([1.0, 2.0, 3.0, 5.0, 7.0])
    groups, advantages = np.zeros(3, np.int64), np.array([1.0, 1.0, -1.0])
    weights = gtpo_group_weights(h, segments, 1.0, groups, advantages)
    assert weights.tolist() == [0.5, 1.0, 1.5, 1.0, 1.0]


def test_inverse_weighting_punishes_confident_mistakes_more() -> None:
    segments, h = Segments([2, 2]), np.array([1.0, 3.0, 1.0, 3.0])
    weights = gtpo_weights(inverted(h, segments, np.array([1.0, -1.0])), segments, 1.0)
    assert weights == pytest.approx([0.5, 1.5, 1.5, 0.5])


# -- the pipeline ----------------------------------------------------------------------------------


def test_every_built_in_name_of_the_configuration_is_built() -> None:
    assert set(TRANSFORMS) == set(builtin_names("transform"))
    for advantage in builtin_names("advantage"):
        assert tokens_of(assign(config("none", advantage), [mixed()]))
    assert set(builtin_names("algorithm")) == {*RECIPES, *recipe_names()}
    for algorithm in RECIPES:
        assert tokens_of(assign(config(algorithm={"algorithm_mode": algorithm}), [mixed()]))


def test_none_spreads_the_episode_advantage() -> None:
    credit = assign(config("none", "grpo"), [mixed()])
    assert tokens_of(credit) == [[[0.5] * 5, [-0.5] * 2]]
    assert credit.groups[0].advantages == [0.5, -0.5]


def test_gtpo_sepa_is_pooling_then_weights() -> None:
    credit = assign(config(gtpo={"beta": 0.5}), [mixed()], lam=0.5)
    h = np.array([0.1, 2.0, 0.3, 1.0, 0.5], np.float32).astype(float)
    mu = (h[0] + h[4]) / 2  # "let me check" is planning
    pooled = np.array([(h[0] + mu) / 2, h[1], h[2], h[3], (h[4] + mu) / 2])
    expected = (1 + 0.5 * (pooled / pooled.mean() - 1)) / 1.000002
    assert credit.groups[0].token_advantages[0] == pytest.approx(expected, rel=1e-5)


def test_hicra_comes_after_the_weights_and_acts_on_planning_tokens_only() -> None:
    weighted, both = (assign(config(name, "grpo"), [mixed()]) for name in ("gtpo", "gtpo_hicra"))
    before, after = (np.array(tokens_of(credit)[0][0]) for credit in (weighted, both))
    assert after == pytest.approx(before * np.array([1.0, 1.2, 1.2, 1.2, 1.0]))
    plain = assign(config("hicra", "grpo"), [mixed()])
    assert tokens_of(plain)[0][0] == pytest.approx([0.5, 0.6, 0.6, 0.6, 0.5])


def test_a_recipe_equals_its_parts() -> None:
    for name, recipe in RECIPES.items():
        whole = config(algorithm={"algorithm_mode": name})
        parts = config(recipe.transform, recipe.advantage)
        assert tokens_of(assign(whole, [mixed()])) == tokens_of(assign(parts, [mixed()])), name


def test_recipes_pass_recorded_entropies_and_rho_through() -> None:
    settings = {"uncertainty_kind": "shannon_entropy", "surprisal_mask_rho": 0.3}
    credit = assign(config(algorithm={"algorithm_mode": "maxrl_gtpo", **settings}), [mixed()], 0.0)
    assert credit.assigned.uncertainty is not None
    assert credit.assigned.uncertainty[1] == pytest.approx(4.0)
    assert sum(value != 0 for row in tokens_of(credit)[0] for value in row) == 2


@pytest.mark.parametrize("transform", sorted(TRANSFORMS))
@settings(max_examples=15, deadline=None)
@given(
    rho=st.floats(0.05, 1.0),
    scope=st.sampled_from(["batch", "group", "completion"]),
    seed=st.integers(0, 1000),
)
def test_rho_masks_under_every_transform(transform: str, rho: float, scope: str, seed: int) -> None:
    rng = np.random.default_rng(seed)

    def drawn(n: int) -> Completion:
        return completion([int(t) for t in rng.integers(0, 6, n)], (-rng.random(n) * 3).tolist())

    groups = [group([1.0, 0.0, 0.0], [*map(drawn, rng.integers(1, 9, 3))]) for _ in range(2)]
    settings_ = {"surprisal_mask_rho": rho, "surprisal_mask_scope": scope}
    credit = assign(config(transform, algorithm=settings_), groups)
    lengths = [[len(c.token_ids) for c in g.trajectories] for g in groups]
    each = [length for row in lengths for length in row]
    pools = {"batch": [sum(each)], "group": [*map(sum, lengths)], "completion": each}
    kept = sum(kept_count(n, rho) for n in pools[scope]) / sum(each)
    assert credit.statistics.surprisal_kept_fraction == pytest.approx(kept)
    before = list(credit.assigned.stages.values())[-2]
    after = credit.assigned.final
    assert ((after == 0) | (after == before)).all()
    assert credit.assigned.uncertainty is not None
    if scope == "batch":
        tau = credit.statistics.surprisal_tau
        assert ((after != 0) == ((credit.assigned.uncertainty >= tau) & (before != 0))).all()


def test_the_kept_denominator_counts_the_kept_tokens_of_each_row() -> None:
    base = {"surprisal_mask_rho": 0.3}
    every = assign(config("none", algorithm=base), [mixed()]).rows()
    kept_alone = base | {"surprisal_mask_denominator": "kept"}
    kept = assign(config("none", algorithm=kept_alone), [mixed()]).rows()
    assert [row.num_counted for row in every] == [row.num_actions for row in every]
    assert [row.num_counted for row in kept] == [int((row.advantages != 0).sum()) for row in kept]
    assert sum(row.num_counted for row in kept) == 2
    for one, other in zip(every, kept, strict=True):
        assert np.array_equal(one.advantages, other.advantages)


def test_groups_without_advantage_do_not_set_the_threshold() -> None:
    loud = group([0.0, 0.0], [completion([4] * 4, [-9.0] * 4), completion([4], [-9.0])])
    credit = assign(config("none", algorithm={"surprisal_mask_rho": 0.3}), [loud, mixed()])
    assert credit.statistics.surprisal_tau == pytest.approx(1.5)
    assert credit.statistics.surprisal_kept_fraction == pytest.approx(2 / 7)


def test_completions_that_the_loss_leaves_out_do_not_set_the_threshold() -> None:
    cut_off = completion([4, 4], [-9.0, -9.0], FinishReason.LENGTH)
    groups = [group([1.0, 0.0, 0.0], [*replies(mixed()), cut_off])]
    for masked, tau in ((False, 9.0), (True, 1.5)):
        loss, algorithm = {"mask_truncated": masked}, {"surprisal_mask_rho": 0.3}
        credit = assign(config("none", algorithm=algorithm, loss=loss), groups)
        assert credit.statistics.surprisal_tau == pytest.approx(tau)


def test_a_group_whose_tokens_are_all_masked_still_counts_as_trained() -> None:
    quiet = group([1.0, 0.0], [completion([4], [-0.01]), completion([4], [-0.01])])
    credit = assign(config("none", algorithm={"surprisal_mask_rho": 0.2}), [quiet, mixed()])
    assert [given.informative for given in credit.groups] == [True, True]
    assert len(credit.rows()) == 4


def test_entropy_mask_without_rho_is_refused() -> None:
    with pytest.raises(ValueError, match="surprisal_mask_rho"):
        CreditPipeline(config("entropy_mask"), pieces)


def test_uniform_groups_have_no_policy_term_and_are_counted_by_cause() -> None:
    pair = [completion([4], [-0.5]), completion([4, 4], [-0.5, -0.1])]
    groups = [group(rewards, pair) for rewards in ([1.0, 1.0], [0.0, 0.0], [0.5, 0.5], [0.7, 0.2])]
    credit = assign(config("none", "grpo"), groups)
    reasons = [given.skip_reason for given in credit.groups]
    assert reasons == ["all_correct", "all_wrong", "all_wrong", ""]
    rows = credit.rows()
    assert [row.num_counted for row in rows] == [0, 0, 0, 0, 0, 0, 1, 2]
    assert not any(row.advantages.any() for row in rows if row.group != 3)
    s = credit.statistics
    assert (s.groups_skipped_all_correct, s.groups_skipped_all_wrong) == (1, 2)
    assert s.groups_skipped_other == 0 and s.informative_fraction == 0.25


def test_a_group_that_maxrl_cannot_use_is_skipped_for_another_reason() -> None:
    pair = [completion([4], [-0.5]), completion([4], [-0.1])]
    credit = assign(config("none"), [group([1e-7, 0.0], pair, threshold=1e-9)])
    assert credit.groups[0].skip_reason == "other"


def test_reinforce_trains_on_uniform_groups() -> None:
    pair = [completion([4], [-0.5]), completion([4], [-0.1])]
    rows = assign(config("none", "reinforce"), [group([1.0, 1.0], pair)]).rows()
    assert [row.num_counted for row in rows] == [1, 1]


def test_rows_hold_prompt_and_actions_in_float32() -> None:
    rows = assign(config("none", "grpo"), [mixed()]).rows()
    assert rows[0].token_ids.tolist() == [7, 8, 0, 1, 2, 3, 4]
    assert rows[0].spans == ((2, 7),)
    assert rows[0].advantages.dtype == np.float32
    assert rows[1].logprobs.tolist() == [-1.5, -0.25]


def test_a_completion_without_tokens_is_counted_and_not_trained() -> None:
    credit = assign(config(), [group([1.0, 0.0], [completion([], []), completion([4], [-0.1])])])
    assert [row.num_actions for row in credit.rows()] == [0, 1]
    assert [row.trained for row in credit.rows()] == [False, True]


@pytest.mark.parametrize(
    ("loss", "silent"),
    [({}, False), ({"kl_coef": 0.1}, True), ({"entropy_coef": 0.1}, True)],
    ids=str,
)
def test_a_row_is_trained_where_the_loss_has_a_term_for_it(
    loss: dict[str, object], silent: bool
) -> None:
    """Rows without an advantage have terms of KL and entropy alone; completions that the loss
    leaves out have none.
    """
    cut_off = completion([4, 4], [-9.0, -9.0], FinishReason.LENGTH)
    uniform = group([1.0, 1.0], [completion([4], [-0.5]), cut_off])
    settings = {**loss, "mask_truncated": True}
    rows = assign(config("none", "grpo", loss=settings), [mixed(), uniform]).rows()
    assert [row.trained for row in rows] == [True, True, silent, False]
    assert [row.key for row in rows] == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]


def test_a_step_without_groups_is_assigned_nothing() -> None:
    for transform in sorted(TRANSFORMS):
        for advantage in ("maxrl", "reinforce_pp"):
            credit = assign(config(transform, advantage, algorithm={"surprisal_mask_rho": 0.2}), [])
            assert (credit.rows(), credit.groups) == ([], [])
            assert credit.statistics.max_abs_advantage is None
            assert credit.statistics.informative_fraction is None


def test_statistics_weigh_tokens_and_are_null_without_any() -> None:
    other = group([1.0, 0.0], [completion([4], [-4.0]), completion([4], [-4.0])])
    s = assign(config(), [mixed(), other]).statistics
    execution = np.array([0.1, 0.5, 1.5, 0.25, 4.0, 4.0])
    assert s.exec_surprisal_mean == pytest.approx(execution.mean(), rel=1e-6)
    assert s.exec_surprisal_var == pytest.approx(execution.var(), rel=1e-6)
    assert s.plan_surprisal_mean == pytest.approx(1.1, rel=1e-6)
    assert s.plan_entropy_mean == pytest.approx(2.2, rel=1e-6)
    unplanned = assign(config(), [other]).statistics
    assert unplanned.plan_surprisal_mean is None and unplanned.plan_entropy_var is None
    assert assign(config(), [without_entropies(other)]).statistics.exec_entropy_mean is None
    without_detector = assign(config("gtpo"), [mixed()]).statistics
    assert without_detector.exec_entropy_mean is None is without_detector.exec_surprisal_var


def test_the_controller_sees_the_configured_uncertainty_of_execution_tokens() -> None:
    credit = assign(config(algorithm={"uncertainty_kind": "predictive_variance"}), [mixed()])
    p = np.exp(np.array([-0.1, -0.5, -1.5, -0.25], np.float32).astype(float))
    assert credit.exec_uncertainty == pytest.approx(p * (1 - p))
    assert len(assign(config("gtpo"), [mixed()]).exec_uncertainty) == 0


def test_a_transform_can_have_its_own_uncertainty() -> None:
    table = {"uncertainty_kind": "surprisal", "transform_params": {"uncertainty_kind": "nll"}}
    assert CreditPipeline(config(algorithm=table), pieces).uncertainty_kind == "surprisal"
    table = {"uncertainty_kind": "surprisal", "transform_params": {"uncertainty_kind": "entropy"}}
    assert CreditPipeline(config(algorithm=table), pieces).uncertainty_kind == "shannon_entropy"


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf")])
def test_a_logprob_that_is_not_finite_is_named_with_its_place(bad: float) -> None:
    broken = group([1.0, 0.0], [completion([4], [-0.5]), completion([4, 4], [-0.5, bad])])
    for transform in ("none", "gtpo_sepa"):
        with pytest.raises(RunFailed, match="group 1, completion 1, position 1: log-prob is"):
            assign(config(transform), [mixed(), broken])


def test_negative_rewards_stop_maxrl_by_name() -> None:
    with pytest.raises(RunFailed, match="group 1: reward 0 is -1"):
        assign(config(), [mixed(), group([-1.0, 0.0], replies(mixed()))])


def test_shannon_entropy_without_recorded_entropies_is_refused() -> None:
    asked = config(algorithm={"uncertainty_kind": "shannon_entropy"})
    with pytest.raises(RunFailed, match="engine records none"):
        assign(asked, [without_entropies(mixed())])


@given(st.permutations(range(3)))
@settings(max_examples=6, deadline=None)
def test_the_order_of_completions_and_groups_does_not_matter(order: list[int]) -> None:
    first, second = replies(mixed())
    completions, rewards = [first, second, completion([4], [-0.7])], [1.0, 0.0, 0.25]
    asked = config("gtpo_sepa", algorithm={"surprisal_mask_rho": 0.5})
    straight = tokens_of(assign(asked, [group(rewards, completions), mixed()]))
    other = group([rewards[i] for i in order], [completions[i] for i in order])
    permuted = tokens_of(assign(asked, [mixed(), other]))
    for got, expected in zip(permuted[0], straight[1], strict=True):
        assert got == pytest.approx(expected)
    for place, index in enumerate(order):
        assert permuted[1][place] == pytest.approx(straight[0][index])


def test_the_inputs_are_never_edited() -> None:
    tokens = StepTokens(
        [[1.0, 0.0]],
        Segments([2, 1]),
        -np.ones(3),
        np.ones(3),
        np.array([True, False, True]),
        np.ones(2, np.bool_),
        teacher=lambda: -np.ones(3),
    )
    copies = [array.copy() for array in (tokens.logprobs, tokens.planning)]
    for name in TRANSFORMS:
        CreditPipeline(config(name, algorithm={"surprisal_mask_rho": 0.5}), pieces).compute(
            tokens, 0, 0.5
        )
        assert tokens.rewards == [[1.0, 0.0]]
        assert (tokens.logprobs == copies[0]).all() and (tokens.planning == copies[1]).all()


def test_unknown_parameters_of_built_ins_are_refused() -> None:
    unknown = r"{} is not a parameter of the built-in \"{}\"; it {}".format
    for table, message in (
        ({"advantage_params": {"scale": 2.0}}, unknown("scale", "maxrl", "knows eps")),
        ({"transform_params": {"cap": 0.2}}, unknown("cap", "gtpo_sepa", "has no parameters")),
        ({"uncertainty_params": {"x": 1}}, "x is not a parameter"),
        ({"algorithm_mode": "grpo_none", "params": {"x": 1}}, "x is not a parameter"),
        ({"advantage_params": {"eps": -1.0}}, "eps is -1.0"),
        ({"advantage_params": {"eps": "big"}}, "advantage_params"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            CreditPipeline(config(algorithm=table), pieces)


def test_an_encoder_is_needed_only_where_a_transform_looks_for_planning() -> None:
    planning = {"detector": "semantic"}
    with pytest.raises(ConfigurationError, match="needs an encoder"):
        CreditPipeline(config(planning=planning), pieces)
    CreditPipeline(config("gtpo", planning=planning), pieces)

"""Episode advantages as formulas: sums, bounds, edge cases, and what is refused."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.advantages.episode import (
    ADVANTAGES,
    checked_groups,
    grpo,
    grpo_std,
    maxrl,
    reinforce,
    reinforce_pp,
    rloo,
)

REWARDS = st.lists(st.floats(0, 1), min_size=1, max_size=16)
CENTERED: list[Callable[[list[float]], list[float]]] = [grpo, maxrl, rloo, grpo_std]


def step(groups: list[list[float]]) -> list[float]:
    return [value for group in reinforce_pp(groups) for value in group]


@pytest.mark.parametrize("advantage", CENTERED)
@given(rewards=REWARDS)
def test_group_relative_advantages_sum_to_zero(
    advantage: Callable[[list[float]], list[float]], rewards: list[float]
) -> None:
    values = advantage(rewards)
    assert len(values) == len(rewards)
    assert abs(math.fsum(values)) <= 1e-9 * max(1.0, *map(abs, values))


@pytest.mark.parametrize("advantage", [*CENTERED, reinforce])
@given(rewards=REWARDS, random=st.randoms(use_true_random=False))
def test_permuted_rewards_give_permuted_advantages(advantage, rewards, random) -> None:  # type: ignore[no-untyped-def]
    order = list(range(len(rewards)))
    random.shuffle(order)
    values = advantage(rewards)
    assert advantage([rewards[i] for i in order]) == pytest.approx(
        [values[i] for i in order], rel=1e-6, abs=1e-9
    )


@pytest.mark.parametrize("advantage", CENTERED)
@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0, 1 / 3])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_a_constant_group_gives_exact_zeros(
    advantage: Callable[[list[float]], list[float]], reward: float, size: int
) -> None:
    assert advantage([reward] * size) == [0.0] * size


@pytest.mark.parametrize("advantage", [*CENTERED, reinforce])
def test_an_empty_group_has_no_advantages(advantage: Callable[[list[float]], list[float]]) -> None:
    assert advantage([]) == []


@given(st.integers(2, 16), st.data())
def test_binary_rewards_stay_within_their_bounds(size: int, data: st.DataObject) -> None:
    rewards = data.draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=size, max_size=size))
    assert max(map(abs, grpo(rewards))) <= (size - 1) / size + 1e-12
    assert all(-1 - 1e-9 <= value <= size - 1 for value in maxrl(rewards))


def test_maxrl_weighs_the_only_success_with_all_others() -> None:
    assert maxrl([1, 0, 0, 0], eps=0.0) == [3.0, -1.0, -1.0, -1.0]


def test_maxrl_refuses_negative_rewards_by_index() -> None:
    with pytest.raises(ValueError, match=r"reward 1 is -0\.5"):
        maxrl([1.0, -0.5])


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=8))
def test_rloo_subtracts_the_mean_of_the_others(rewards: list[float]) -> None:
    others = [r - (sum(rewards) - r) / (len(rewards) - 1) for r in rewards]
    assert rloo(rewards) == pytest.approx(others, abs=1e-12)


def test_grpo_std_divides_by_the_deviation_of_ddof() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0, 0.5]
    for ddof in (0, 1):
        expected = (np.array(rewards) - 0.5) / (np.std(rewards, ddof=ddof) + 1e-6)
        assert grpo_std(rewards, ddof=ddof) == pytest.approx(expected.tolist())
    assert grpo_std([1.0], ddof=1) == [0.0]
    assert grpo_std([1.0, 0.0], ddof=2) == [0.0, 0.0]


def test_reinforce_keeps_uniform_groups() -> None:
    assert reinforce([1.0, 1.0]) == [1.0, 1.0]
    assert reinforce([1.0, 0.0], baseline=0.25) == [0.75, -0.25]


@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), max_size=5), max_size=4))
def test_reinforce_pp_is_standardized_over_the_step(groups: list[list[float]]) -> None:
    values = step(groups)
    assert [len(group) for group in reinforce_pp(groups)] == [len(group) for group in groups]
    if any(values):
        assert np.mean(values) == pytest.approx(0.0, abs=1e-7)
        assert np.std(values) == pytest.approx(1.0, abs=1e-6)


def test_reinforce_pp_counts_members_that_are_zero() -> None:
    """A group whose rewards are all equal has zeros, which belong to the mean and the deviation of
    the step.
    """
    values = reinforce_pp([[1.0, 0.0], [1.0, 1.0]], eps=0.0)
    assert values == [pytest.approx([math.sqrt(2), -math.sqrt(2)]), [0.0, 0.0]]


def test_reinforce_pp_can_weigh_by_tokens() -> None:
    flat = reinforce_pp([[1.0, 0.0], [1.0, 0.0]], [[3, 1], [3, 1]], eps=0.0, weight="token")
    values, counts = np.array(flat).ravel(), np.array([3, 1, 3, 1])
    assert np.average(values, weights=counts) == pytest.approx(0.0)
    assert np.average(values**2, weights=counts) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="number of tokens"):
        reinforce_pp([[1.0, 0.0]], weight="token")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_named(bad: float) -> None:
    for function in (grpo, maxrl, rloo, grpo_std, reinforce):
        with pytest.raises(ValueError, match="reward 2 is"):
            function([0.0, 1.0, bad])
    with pytest.raises(ValueError, match="group 1: reward 0 is"):
        reinforce_pp([[0.0], [bad]])
    with pytest.raises(ValueError, match="group 1: reward 0 is"):
        checked_groups([[0.0], [bad]])


@pytest.mark.parametrize(("samples", "p"), [(2, 0.3), (4, 0.3), (8, 0.05), (8, 0.9)])
def test_maxrl_is_unbiased_for_one_order_below_the_group_size(samples: int, p: float) -> None:
    """E = grad p (1 - (1-p)^(N-1)) / p: a group without a success contributes nothing, which costs
    one order.
    """
    from golden import expected_gradient_coefficient

    assert expected_gradient_coefficient("maxrl", samples, p, 0.0) == pytest.approx(
        (1 - (1 - p) ** (samples - 1)) / p
    )
    assert expected_gradient_coefficient("grpo", samples, p, 0.0) == pytest.approx(
        (samples - 1) / samples
    )
    assert expected_gradient_coefficient("rloo", samples, p, 0.0) == pytest.approx(1.0)


def test_inputs_are_never_edited() -> None:
    rewards = np.array([1.0, 0.0, 0.5])
    for name, builtin in ADVANTAGES.items():
        builtin.function([rewards] if builtin.batch_level else rewards)
        assert rewards.tolist() == [1.0, 0.0, 0.5], name

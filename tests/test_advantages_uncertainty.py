"""Uncertainty per token, and the top-rho mask."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.advantages.transforms import (
    canonical_kind,
    capped,
    kept_count,
    predictive_variance,
    shannon_entropy,
    surprisal,
    top_rho,
)


def test_surprisal_is_clamped_to_its_cap_and_to_zero() -> None:
    assert surprisal([0.0, -0.5, -60.0, 1e-4, -math.inf]).tolist() == [0.0, 0.5, 50.0, 0.0, 50.0]
    assert surprisal([-3.0], cap=2.0).tolist() == [2.0]


def test_predictive_variance_is_that_of_a_coin() -> None:
    assert predictive_variance(
        [math.log(0.5), math.log(0.25), 0.0, 0.1, -math.inf]
    ) == pytest.approx([0.25, 0.1875, 0.0, 0.0, 0.0])


def test_nan_is_refused_by_every_kind_with_its_position() -> None:
    for function in (surprisal, predictive_variance, shannon_entropy):
        with pytest.raises(ValueError, match="1 is NaN"):
            function([-0.1, math.nan])
    with pytest.raises(ValueError, match="NaN"):
        capped(np.array([math.nan]))


def test_aliases_name_the_three_kinds() -> None:
    assert canonical_kind("nll") == "surprisal"
    assert canonical_kind("entropy") == "shannon_entropy"
    assert canonical_kind("pred_var") == "predictive_variance"
    assert canonical_kind("varentropy") == "varentropy"


def masked(values: list[float], rho: float, pools: list[int] | None = None) -> list[int]:
    numbers = np.array(pools if pools is not None else [0] * len(values), dtype=np.int64)
    return (
        top_rho(np.array(values), numbers, int(max(numbers, default=0)) + 1, rho)
        .keep.astype(int)
        .tolist()
    )


def test_the_count_is_the_floor_without_float_noise() -> None:
    assert [
        kept_count(n, rho) for n, rho in ((100, 0.29), (10, 0.2), (3, 0.2), (0, 0.5), (7, 1.0))
    ] == [29, 2, 1, 0, 7]


def test_ties_at_the_threshold_are_all_kept() -> None:
    assert masked([1.0, 2.0, 2.0, 0.5], 0.25) == [0, 1, 1, 0]
    assert masked([1.0] * 4, 0.25) == [1, 1, 1, 1]


def test_rho_zero_is_off_and_rho_one_keeps_all() -> None:
    assert masked([1.0, 2.0], 0.0) == [1, 1]
    assert masked([1.0, 2.0], 1.0) == [1, 1]
    assert top_rho(np.array([1.0, 2.0]), np.zeros(2, dtype=np.int64), 1, 0.0).thresholds == [None]


def test_no_token_gives_no_threshold() -> None:
    result = top_rho(np.zeros(0), np.zeros(0, dtype=np.int64), 1, 0.5)
    assert (result.keep.tolist(), result.thresholds) == ([], [None])


def test_each_pool_has_its_own_threshold_and_strangers_are_left_alone() -> None:
    pools = np.array([0, 1, 0, 1, -1])
    result = top_rho(np.array([1.0, 5.0, 2.0, 6.0, 0.0]), pools, 2, 0.5)
    assert result.keep.tolist() == [False, False, True, True, True]
    assert result.thresholds == [2.0, 6.0]


@pytest.mark.parametrize("rho", [-0.1, 1.1, math.nan])
def test_rho_outside_the_unit_interval_is_refused(rho: float) -> None:
    with pytest.raises(ValueError, match="must lie in"):
        masked([1.0], rho)


@given(
    st.lists(st.floats(0, 50), min_size=1, max_size=40),
    st.floats(0.01, 1.0),
    st.randoms(use_true_random=False),
)
def test_the_mask_does_not_depend_on_the_order_of_tokens(values, rho, random) -> None:  # type: ignore[no-untyped-def]
    order = list(range(len(values)))
    random.shuffle(order)
    keep = masked(values, rho)
    assert masked([values[i] for i in order], rho) == [keep[i] for i in order]
    assert sum(keep) >= kept_count(len(values), rho)

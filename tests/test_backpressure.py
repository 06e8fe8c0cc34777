"""Back pressure on simulated machines whose law is known."""

import json
import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.backpressure import (
    Action,
    BackpressureController,
    Decision,
    Regime,
    ScalingLaw,
    capacity,
    fit_scaling_law,
    optimal_concurrency,
    roofline,
    step_flops,
    sweep_sizes,
)
from retrain.config.schema import Backpressure
from retrain.records.entries import StepRecord

SIZES = [16.0 * 2**power for power in range(7)]
LAW = ScalingLaw(50.0, 0.02, 1e-5)  # p* = 313
GROUP = 16


# -- the law and its fit ---------------------------------------------------------------------------


@given(
    st.floats(0, 0.9),
    st.floats(1e-6, 1e-2),
    st.floats(0.1, 1e5),
    st.sampled_from(["relative", "none"]),
)
@settings(max_examples=60, deadline=None)
def test_a_law_is_recovered_from_what_it_gives(
    sigma: float, kappa: float, lam: float, weights: str
) -> None:
    law = ScalingLaw(lam, sigma, kappa)
    fit = fit_scaling_law(SIZES, [law.throughput(p) for p in SIZES], weights, 0.0)  # type: ignore[arg-type]
    assert fit.status == "ok" and fit.law is not None and fit.r2 == pytest.approx(1.0, abs=1e-6)
    assert fit.law.lam == pytest.approx(lam, rel=1e-6)
    assert fit.law.sigma == pytest.approx(sigma, abs=1e-6)
    assert fit.law.kappa == pytest.approx(kappa, rel=1e-5, abs=1e-9)


def test_the_optimum_is_where_throughput_is_highest() -> None:
    best = max(range(1, 2000), key=LAW.throughput)
    assert abs(best - LAW.optimum) <= 1
    assert LAW.peak(1000) == pytest.approx(LAW.throughput(LAW.optimum))
    assert LAW.peak(100) == LAW.throughput(100)
    assert capacity(1, 0.3, 0.2) == 1.0 and capacity(0, 0.3, 0.2) == 0.0
    assert optimal_concurrency(0.1, 0.0) == optimal_concurrency(0.1, -1.0) == math.inf
    assert optimal_concurrency(1.5, 0.01) == optimal_concurrency(1.0, 0.01) == 1.0


def test_without_a_coherency_penalty_the_optimum_is_infinite_and_the_peak_is_not() -> None:
    fit = fit_scaling_law(SIZES, [ScalingLaw(50, 0.05, 0).throughput(p) for p in SIZES])
    assert fit.law is not None and (fit.law.kappa, fit.law.optimum) == (0.0, math.inf)
    assert fit.law.sigma == pytest.approx(0.05)
    assert fit.law.peak(1024) == pytest.approx(ScalingLaw(50, 0.05, 0).throughput(1024))


def test_a_parabola_that_bends_down_is_fitted_again_as_a_line() -> None:
    p = np.array(SIZES)
    y = 0.02 + 0.001 * p - 2e-7 * p**2
    fit = fit_scaling_law(SIZES, list(p / y), "none", 0.0)
    slope, intercept = np.polyfit(p, y, 1)
    assert fit.law is not None and fit.law.kappa == 0.0
    assert fit.law.sigma == pytest.approx(slope / (slope + intercept))
    assert fit.law.lam == pytest.approx(1 / (slope + intercept))


def test_relative_weights_are_those_of_multiplicative_noise() -> None:
    p = np.array(SIZES)
    noise = np.array([1.1, 0.9, 1.05, 0.97, 1.02, 0.93, 1.04])
    throughput = np.array([LAW.throughput(value) for value in p]) * noise
    y = p / throughput
    for weights, w in (("relative", 1 / y), ("none", np.ones_like(y))):
        c, b, a = np.polyfit(p, y, 2, w=w)
        fit = fit_scaling_law(SIZES, list(throughput), weights, 0.0)  # type: ignore[arg-type]
        assert fit.law is not None
        assert fit.law.lam == pytest.approx(1 / (a + b + c), rel=1e-6)
        assert fit.law.kappa == pytest.approx(c / (a + b + c), rel=1e-6)


def test_superlinear_scaling_is_clamped_and_flagged() -> None:
    fit = fit_scaling_law(SIZES, [p**1.1 for p in SIZES])
    assert fit.superlinear and fit.law is not None and fit.law.sigma == 0.0


def test_what_is_no_law_is_not_given_as_one() -> None:
    assert fit_scaling_law([16, 32] * 40, [10.0, 20.0] * 40).status == "insufficient"
    assert fit_scaling_law([], []).status == "insufficient"
    noise = list(np.random.default_rng(0).uniform(1, 100, 20))
    fit = fit_scaling_law([16, 32, 64, 128] * 5, noise)
    assert fit.status == "unknown" and fit.r2 is not None and fit.r2 < 0.5
    assert fit_scaling_law([10, 20, 30], [100.0, 4.0, 3.0], "none").status == "rejected"
    for p, x in (
        ([1.0, 2.0], [1.0]),
        ([0.5, 2, 3], [1.0] * 3),
        ([1, 2, 3], [1.0, 0.0, 1.0]),
        ([1, 2, 3], [1.0, math.nan, 1.0]),
    ):
        with pytest.raises(ValueError):
            fit_scaling_law(p, x)


def test_a_fit_forgets_what_is_older_than_its_window() -> None:
    old = [ScalingLaw(5, 0.5, 0.01).throughput(p) for p in SIZES] * 10
    new = [LAW.throughput(p) for p in SIZES] * 15
    fit = fit_scaling_law(SIZES * 25, old + new)
    assert fit.law is not None and fit.law.lam == pytest.approx(50, rel=1e-6)


# -- the controller --------------------------------------------------------------------------------


def drive(
    controller: BackpressureController, throughput: Callable[[float], float], steps: int
) -> list[Decision]:
    """Steps of a machine that gives `throughput(p)` tokens a second."""
    decisions = []
    for _ in range(steps):
        tokens = 100 * controller.batch_size * GROUP
        decisions.append(
            controller.observe(tokens, tokens / throughput(controller.batch_size * GROUP))
        )
    return decisions


def controller(batch_size: int = 8, **values: object) -> BackpressureController:
    return BackpressureController(Backpressure.model_validate(values), batch_size, GROUP)


def after_the_sweep(
    one: BackpressureController, throughput: Callable[[float], float], steps: int
) -> list[Decision]:
    return drive(one, throughput, one.sweep_steps + steps)[one.sweep_steps :]


def test_the_sweep_visits_every_size_twice_and_returns_to_the_configured_one() -> None:
    assert sweep_sizes(3, 20) == (3, 6, 12, 20) and sweep_sizes(4, 4) == (4,)
    for warmup in (1, 10, 20):
        one = controller(warmup_steps=warmup)
        decisions = drive(one, LAW.throughput, one.sweep_steps)
        visits = Counter(decision.batch_size for decision in decisions)
        assert set(visits) == {1, 2, 4, 8, 16, 32, 64} and min(visits.values()) >= 2
        assert {decision.regime for decision in decisions} == {Regime.WARMUP}
        assert one.batch_size == 8


@pytest.mark.parametrize(("start", "first"), [(2, Action.INCREASE), (64, Action.THROTTLE)])
def test_the_batch_goes_to_the_target_and_stays(start: int, first: Action) -> None:
    """floor(0.85 x 313 / 16) = 16 prompts."""
    one = controller(start)
    decisions = after_the_sweep(one, LAW.throughput, 40)
    actions = [decision.action for decision in decisions if decision.action is not Action.HOLD]
    assert actions[0] is first and set(actions) == {first}
    assert one.batch_size in ((8, 16) if start == 2 else (16,))
    assert decisions[-1].regime is Regime.NEAR_TARGET


def test_a_batch_below_its_target_on_a_clean_law_is_not_called_retrograde() -> None:
    decisions = after_the_sweep(controller(8), LAW.throughput, 20)
    assert Regime.RETROGRADE not in {decision.regime for decision in decisions}
    share = LAW.throughput(256) / LAW.throughput(LAW.optimum)
    assert decisions[-1].utilization == pytest.approx(share, rel=1e-6)


def test_growth_doubles_at_most_and_waits_between_changes() -> None:
    one = controller(1, cooldown=4)
    decisions = after_the_sweep(one, ScalingLaw(50, 0.001, 1e-7).throughput, 40)
    changes = [at for at, one in enumerate(decisions) if one.action is not Action.HOLD]
    assert len(changes) >= 4 and min(np.diff(changes)) == 4 and changes[0] == 3
    assert all(decision.next_batch_size <= 2 * decision.batch_size for decision in decisions)
    assert one.batch_size == 64


@pytest.mark.parametrize(("sigma", "last"), [(0.0001, 64), (0.9, 4)])
def test_without_an_optimum_the_batch_grows_while_that_pays(sigma: float, last: int) -> None:
    one = controller(4)
    decisions = after_the_sweep(one, ScalingLaw(50, sigma, 0.0).throughput, 60)
    assert {decision.regime for decision in decisions} == {Regime.UNBOUNDED}
    assert one.batch_size == last
    assert decisions[-1].utilization is not None and 0.5 < decisions[-1].utilization <= 1.0 + 1e-9
    assert decisions[-1].record_fields()["bp_optimal_concurrency"] is None


def test_measurements_that_no_law_explains_change_nothing() -> None:
    noise = np.random.default_rng(1)
    decisions = after_the_sweep(controller(8), lambda p: float(noise.uniform(10, 1000)), 60)
    unexplained = [decision for decision in decisions if decision.r2 is None or decision.r2 < 0.5]
    assert unexplained and {one.regime for one in unexplained} == {Regime.UNKNOWN}
    assert {one.action for one in unexplained} == {Action.HOLD}


def test_a_slow_stretch_throttles_nothing() -> None:
    one = controller(8)
    drive(one, LAW.throughput, one.sweep_steps + 10)
    slow = drive(one, lambda p: 0.5 * LAW.throughput(p), 12)
    assert Action.THROTTLE not in {decision.action for decision in slow}


def test_smoothing_starts_anew_at_another_concurrency() -> None:
    one = controller(8, warmup_steps=1)
    for decision in drive(one, LAW.throughput, one.sweep_steps):
        expected = LAW.throughput(decision.batch_size * GROUP)
        assert decision.throughput == pytest.approx(expected)


def test_bounds_hold_for_every_change() -> None:
    one = controller(40, min_batch_size=20, max_batch_size=48)
    decisions = drive(one, LAW.throughput, one.sweep_steps + 20)
    assert {decision.next_batch_size for decision in decisions} <= {20, 40, 48}
    assert one.batch_size == 20


@given(st.integers(1, 50), st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_a_restored_controller_goes_on_as_the_first_would_have(cut: int, seed: int) -> None:
    rates = np.random.default_rng(seed).uniform(0.8, 1.2, 60)

    def run(one: BackpressureController, part: np.ndarray) -> list[Decision]:
        return [
            drive(one, lambda p, factor=factor: factor * LAW.throughput(p), 1)[0] for factor in part
        ]  # type: ignore[misc]

    whole = run(controller(), rates)
    first, second = controller(), controller()
    before = run(first, rates[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert json.dumps(second.state_dict()) == json.dumps(first.state_dict())
    assert before + run(second, rates[cut:]) == whole


def test_a_decision_fills_the_fields_of_a_step_record() -> None:
    one = controller(2)
    decision = drive(one, LAW.throughput, one.sweep_steps + 1)[-1]
    record = StepRecord(step=0, condition="maxrl+none", **decision.record_fields())
    assert (record.bp_action, record.bp_regime) == ("hold", "below_target")
    assert record.bp_optimal_concurrency == pytest.approx(LAW.optimum, rel=1e-6)
    hint = roofline(1e12, 1e11, 1.0, peak_gflops=1000, peak_bw_gb_s=10)
    assert decision.record_fields(hint)["bp_regime"] == "memory_bound"


def test_a_step_without_tokens_or_time_is_an_error() -> None:
    for tokens, seconds in ((0, 1.0), (1, 0.0), (1, math.nan)):
        with pytest.raises(ValueError):
            controller().observe(tokens, seconds)


# -- the roofline ----------------------------------------------------------------------------------


def test_the_ridge_separates_memory_from_compute() -> None:
    """An H100: 990 TFLOP/s and 3,350 GB/s, a ridge of 295 FLOP a byte."""
    low = roofline(1e12, 1e10, 0.01, 990_000, 3350)
    high = roofline(1e13, 1e10, 0.1, 990_000, 3350)
    assert low is not None and high is not None
    assert (low.bound, high.bound) == ("memory_bound", "compute_bound")
    assert low.ridge == pytest.approx(295.5, abs=0.1) and low.intensity == pytest.approx(100)
    assert low.utilization == pytest.approx(100_000 / (100 * 3350))
    assert high.utilization == pytest.approx(100_000 / 990_000)
    assert step_flops(10, 3, 2) == 2 * 10 * 3 + 6 * 10 * 2


def test_an_unknown_peak_gives_no_hint() -> None:
    assert roofline(1e12, 1e10, 1.0, 0, 3350) is None
    assert roofline(1e12, 1e10, 1.0, 990_000, 0) is None
    with pytest.raises(ValueError):
        roofline(1e12, 0, 1.0, 1, 1)

"""SEPA's controller: ramp, gate, automatic schedule, and its state."""

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.advantages.sepa import SEPAController, check_ramp, maximal_lambda, maximal_lambda_note
from retrain.config import TrainConfig
from retrain.config.schema import Sepa
from retrain.errors import ConfigurationError


def sepa(**changes: Any) -> Sepa:
    short = {"steps": 10, "delay_steps": 2, "correct_rate_gate": 0.0, "ema_decay": 0.5, "warmup": 2}
    return Sepa(**{**short, **changes})


def test_the_ramp_starts_after_the_delay_and_ends_at_one() -> None:
    controller = SEPAController(sepa())
    resolved = [controller.resolve(step) for step in (0, 1, 2, 3, 7, 12, 100)]
    assert resolved == [0.0, 0.0, 0.0, 0.1, 0.5, 1.0, 1.0]


def test_a_gate_that_opens_acts_from_the_next_resolve_and_stays_open() -> None:
    controller = SEPAController(sepa(correct_rate_gate=0.5))
    assert controller.resolve(7) == 0.0
    controller.observe(0.49, 7)
    assert not controller.gate_open
    controller.observe(0.5, 8)
    assert (controller.gate_open, controller.gate_step) == (True, 8)
    controller.observe(0.0, 9)
    assert controller.resolve(9) == 0.7, "the ramp is not restarted: lambda jumps"


def test_an_unknown_correct_rate_says_nothing() -> None:
    controller = SEPAController(sepa(correct_rate_gate=0.1))
    controller.observe(None, 0)
    controller.observe(math.nan, 1)
    assert not controller.gate_open


def test_auto_follows_the_decay_of_the_variance_above_the_linear_floor() -> None:
    controller = SEPAController(sepa(schedule="auto", delay_steps=100, warmup=1, ema_decay=0.0))
    assert controller.resolve(0) == 0.0
    controller.update_auto([0.0, 2.0])
    assert controller.var_0 == 1.0
    for spread, expected in ((0.0, 1.0), (math.sqrt(0.1), 0.5), (1.0, 0.0), (3.0, 0.0)):
        controller.update_auto([1.0 - spread, 1.0 + spread])
        assert controller.resolve(1) == pytest.approx(expected)
    assert controller.resolve(105) == 0.5
    said = Sepa.model_fields["var_threshold"].description or ""
    assert "variance below which pooling starts; it completes as the variance goes to 0" in said


def test_one_update_a_step_takes_the_population_variance_of_finite_values() -> None:
    controller = SEPAController(sepa(schedule="auto"))
    controller.update_auto([])
    controller.update_auto([math.nan, math.inf])
    assert (controller.var_ema, controller.warmup_seen) == (None, 0)
    controller.update_auto([1.0, 3.0, math.nan])
    assert (controller.var_ema, controller.var_0, controller.warmup_seen) == (1.0, None, 1)
    controller.update_auto(np.array([2.0, 2.0]))
    assert (controller.var_ema, controller.var_0, controller.warmup_seen) == (0.5, 0.5, 2)
    controller.update_auto([2.0, 2.0])
    assert (controller.var_ema, controller.var_0, controller.warmup_seen) == (0.25, 0.5, 2)


def test_a_policy_that_is_sure_from_the_start_gives_no_division_by_zero() -> None:
    controller = SEPAController(sepa(schedule="auto", warmup=1))
    controller.update_auto([1.0])
    assert controller.var_0 == 1e-8
    assert controller.resolve(0) == 1.0


EVENTS = st.lists(
    st.tuples(st.one_of(st.none(), st.floats(0, 1)), st.lists(st.floats(0, 50), max_size=4)),
    max_size=12,
)


@given(EVENTS, st.integers(0, 12), st.sampled_from(["linear", "auto"]))
def test_a_restored_controller_goes_on_as_if_never_stored(events, cut, schedule) -> None:  # type: ignore[no-untyped-def]
    settings = sepa(schedule=schedule, correct_rate_gate=0.3)
    straight, resumed = SEPAController(settings), SEPAController(settings)
    for step, (rate, uncertainty) in enumerate(events):
        if step == cut:
            stored = json.loads(json.dumps(resumed.state_dict()))
            resumed = SEPAController(settings)
            assert resumed.load_state_dict(stored) == []
        assert resumed.resolve(step) == straight.resolve(step)
        for controller in (straight, resumed):
            controller.observe(rate, step)
            controller.update_auto(uncertainty)
    assert resumed.state_dict() == straight.state_dict()


@given(EVENTS)
def test_lambda_stays_in_the_unit_interval(events) -> None:  # type: ignore[no-untyped-def]
    controller = SEPAController(sepa(schedule="auto", warmup=1))
    for step, (_, uncertainty) in enumerate(events):
        controller.update_auto(uncertainty)
        assert 0.0 <= controller.resolve(step) <= 1.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gate_open", 1),
        ("gate_open", None),
        ("gate_step", -1),
        ("gate_step", True),
        ("warmup_seen", -1),
        ("warmup_seen", 1.5),
        ("var_ema", math.nan),
        ("var_0", math.inf),
        ("var_0", -1.0),
        ("var_ema", "1"),
    ],
)
def test_an_impossible_state_is_refused_and_changes_nothing(field: str, value: object) -> None:
    controller = SEPAController(sepa())
    before = controller.state_dict()
    with pytest.raises(ValueError, match=field):
        controller.load_state_dict(before | {"gate_open": False} | {field: value})
    assert controller.state_dict() == before


def test_a_changed_setting_is_told_at_resume() -> None:
    stored = SEPAController(sepa(steps=10)).state_dict()
    notes = SEPAController(sepa(steps=20)).load_state_dict(stored)
    assert notes == [
        "[sepa] steps = 20 differs from 10, with which the checkpoint's controller ran."
    ]


def test_a_linear_schedule_without_steps_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="steps = 0"):
        check_ramp(sepa(steps=0))
    check_ramp(sepa(steps=0, schedule="auto"))


def config(transform: str = "gtpo_sepa", **sections: dict[str, object]) -> TrainConfig:
    return TrainConfig.model_validate({"algorithm": {"transform_mode": transform}, **sections})


def note_of(config: TrainConfig) -> str | None:
    return maximal_lambda_note(config.algorithm, config.sepa, config.training.max_steps)


def test_a_ramp_that_does_not_end_is_told_before_the_run() -> None:
    assert maximal_lambda(config().sepa, config().training.max_steps) == pytest.approx(0.898)
    note = note_of(config())
    assert note is not None and "0.898" in note
    assert note_of(config(sepa={"steps": 100, "delay_steps": 0})) is None
    assert note_of(config("gtpo")) is None

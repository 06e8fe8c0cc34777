"""Trackers outside of the run's folder: which ones, under which names, and what a missing extra
says.
"""

import sys
from pathlib import Path
from typing import Any

import pytest

from retrain.config import TrainConfig
from retrain.errors import EnvironmentFailure
from retrain.records.entries import StepRecord
from retrain.records.run_folder import RunFolder
from retrain.tracking import build_tracker
from retrain.tracking.base import Tracker, Trackers
from retrain.tracking.build import tracker_names
from retrain.tracking.external import import_extra, metric_name, metrics

FIELDS: dict[str, Any] = {"loss": 0.5, "exec_entropy_mean": 1.0, "bp_sigma": 0.1}
RECORD = StepRecord(step=4, condition="grpo+none", sepa_gate_open=True, **FIELDS)


def config(**logging: Any) -> TrainConfig:
    return TrainConfig.model_validate({"logging": logging})


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("loss", "train/loss"),
        ("entropy_mean", "train/entropy/mean"),
        ("exec_entropy_mean", "train/entropy/exec_mean"),
        ("plan_entropy_var", "train/entropy/plan_var"),
        ("plan_surprisal_mean", "train/surprisal/plan_mean"),
        ("bp_sigma", "train/backpressure/sigma"),
    ],
)
def test_metric_names_have_the_documented_prefixes(field: str, name: str) -> None:
    assert metric_name(field) == name


def test_absent_numbers_are_not_logged() -> None:
    switches = {"train/loss_is_placeholder": 0.0, "train/sepa_gate_open": 1.0}
    numbers = {"train/loss": 0.5, "train/entropy/exec_mean": 1.0, "train/backpressure/sigma": 0.1}
    assert metrics(RECORD) == switches | numbers


def test_scheduled_values_are_sent() -> None:
    moved = StepRecord(step=4, condition="grpo+none", scheduled={"loss.kl_coef": 0.1})
    assert metrics(moved)["train/schedule/loss.kl_coef"] == 0.1


def test_a_wandb_project_switches_wandb_on() -> None:
    assert tracker_names(config().logging) == []
    assert tracker_names(config(wandb_project="p").logging) == ["wandb"]
    assert tracker_names(config(wandb_project="p", trackers=["tensorboard", "wandb"]).logging) == [
        "tensorboard",
        "wandb",
    ]


def test_a_missing_extra_is_one_sentence_that_names_it() -> None:
    told = r"a_module.*this environment lacks.*pip install .*\[trackio\]"
    with pytest.raises(EnvironmentFailure, match=told):
        import_extra("a_module_that_nobody_has", "trackio")


def test_without_trackers_no_tracker_is_imported(tmp_path: Path) -> None:
    before = set(sys.modules)
    build_tracker(config(), RunFolder(tmp_path), condition="a+b").close()
    assert not {"wandb", "trackio", "tensorboard"} & (set(sys.modules) - before)


def test_every_sink_is_closed_even_if_one_fails() -> None:
    closed = []

    class Sink(Tracker):
        def __init__(self, fails: bool) -> None:
            self.fails = fails

        def close(self) -> None:
            closed.append(self.fails)
            if self.fails:
                raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        Trackers([Sink(False), Sink(True), Sink(False)]).close()
    assert sorted(closed) == [False, False, True]

"""`retrain explain`: what a configuration would do, against what it does."""

import json
from pathlib import Path
from typing import Any

import pytest
from campaigns import problems, write_campaign, write_run
from runs import lines, small

from retrain.campaign import CampaignPlan, plan_campaign
from retrain.cli.main import main
from retrain.config import (
    TrainConfig,
    config_from_mapping,
    config_from_toml,
    dump_toml,
    load_config,
    replaced,
)
from retrain.config.overrides import deep_merge
from retrain.errors import ConfigurationError
from retrain.explain import explain
from retrain.explain.explanation import Explanation
from retrain.explain.text import to_text
from retrain.explain.timing import StepTime, schedule_campaign
from retrain.records.state import TrainerState
from retrain.run.loop import Run
from retrain.run.notes import notes
from tests.runs import small_run

CAMPAIGN: dict[str, Any] = {
    "model": {"model": "lab", "lora_rank": 4},
    "data": {"source": "lab"},
    "backend": {"devices": "cpu"},
    "training": {"batch_size": 2, "group_size": 4, "max_tokens": 24},
    "campaign": {"seeds": [1, 2, 3, 4, 5, 6, 7, 8], "max_steps": 50},
}


def campaign(**sections: dict[str, Any]) -> TrainConfig:
    return config_from_mapping(deep_merge(CAMPAIGN, sections))


def write(folder: Path, config: TrainConfig) -> Path:
    path = folder / "this.toml"
    path.write_text(dump_toml(config), encoding="utf-8")
    return path


def explained(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> Any:
    assert main(["explain", *map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


# -- what would run --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Explanation, Run]:
    """What is explained of a run of one step, and that run."""
    config = small(tmp_path_factory.mktemp("once") / "run", training={"max_steps": 1})
    return explain(config), small_run(config, quiet=True)


def test_what_is_explained_of_a_run_is_what_the_run_does(once: tuple[Explanation, Run]) -> None:
    seen, run = once
    path = run.folder / "trainer_state.json"
    state = TrainerState.from_json(path.read_text(), path)
    assert seen.memory is not None and seen.memory.choices == state.choices
    assert [(item.name, item.condition, item.seed) for item in seen.runs] == [
        ("run", run.summary.condition, run.summary.seed)
    ]
    assert seen.schedule is not None and seen.schedule.total_campaign_steps == run.summary.steps


def test_every_condition_meets_every_seed_once() -> None:
    seen = explain(campaign())
    assert len(seen.runs) == 40 == len({(run.condition, run.seed) for run in seen.runs})
    assert len(seen.conditions) == 5
    assert seen.to_json()["runs"][0]["name"] == "grpo+none_s1"
    assert seen.schedule is not None and seen.schedule.total_campaign_steps == 5 * 8 * 50
    assert "5 conditions x 8 seeds = 40 runs of 50 steps" in to_text(seen)


def test_a_condition_shows_what_it_sets_and_how_far_lambda_comes() -> None:
    pooled = {"advantage_mode": "maxrl", "transform_mode": "gtpo_sepa"}
    ramp = {"steps": 20, "delay_steps": 5}
    plain = {"advantage_mode": "maxrl", "transform_mode": "none"}
    conditions = [pooled | {"sepa": ramp, "label": "short-ramp"}, pooled, plain]
    seen = explain(campaign(campaign={"conditions": conditions}))
    # The default ramp begins after step 50.
    assert [condition.maximal_lambda for condition in seen.conditions] == [1.0, 0.0, None]
    assert seen.conditions[0].sets == {"sepa.steps": 20, "sepa.delay_steps": 5}
    (warning,) = [sentence for sentence in seen.warnings if "lambda" in sentence]
    assert warning.startswith("maxrl+gtpo_sepa: SEPA's lambda reaches at most 0.000")


def test_a_run_that_goes_on_has_only_its_last_steps_before_it(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 3, [0.5] * 4, finished=False, max_steps=10)
    seen = explain(small(folder, training={"max_steps": 10}, resume={"from": str(folder)}))
    assert seen.schedule is not None
    assert (seen.schedule.total_campaign_steps, seen.schedule.steps_left) == (10, 6)
    assert "10 steps (4 done)" in to_text(seen)


def test_a_squeeze_job_shows_the_adapter_that_it_would_read(
    once: tuple[Explanation, Run], tmp_path: Path
) -> None:
    seen = explain(config_from_mapping({"squeeze": {"adapter_path": str(once[1].adapter)}}))
    assert seen.adapter is not None and seen.adapter.rank == 4
    assert (seen.kind, seen.refused, seen.memory, seen.schedule) == ("squeeze", (), None, None)
    assert "1, 2, 4" in to_text(seen)
    absent = explain(config_from_mapping({"squeeze": {"adapter_path": str(tmp_path)}}))
    assert absent.adapter is None and "adapter_config.json" in absent.refused[0]
    assert "Would be refused" in to_text(absent)


# -- settings --------------------------------------------------------------------------------------


def test_values_that_differ_from_the_defaults_come_with_their_place(tmp_path: Path) -> None:
    file = tmp_path / "this.toml"
    file.write_text('[model]\nmodel = "lab"\n[training]\nbatch_size = 3\ngroup_size = 16\n')
    config = load_config(file, ["--lr", "1e-3"], environ={"RETRAIN_TRAINING_MAX_STEPS": "7"})
    assert [(item.key, item.value, item.origin) for item in explain(config).settings] == [
        ("model.model", "lab", "file"),
        ("training.max_steps", 7, "environment RETRAIN_TRAINING_MAX_STEPS"),
        ("training.batch_size", 3, "file"),
        ("training.lr", 1e-3, "flag --lr"),
    ]


def test_keys_without_effect_and_features_that_are_refused_are_said(tmp_path: Path) -> None:
    sections = {"hicra": {"alpha": 0.5}, "inference": {"engine": "vllm"}}
    seen = explain(small(tmp_path, planning={"detector": "regex"}, **sections))
    assert any("[hicra] alpha = 0.5 has no effect" in sentence for sentence in seen.unused)
    assert any('engine = "vllm"' in sentence for sentence in seen.refused)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"loss": {"mode": "ppo"}}, "with one update per step never clips"),
        ({"loss": {"mode": "plugins.own"}}, "A clip of it acts with"),
        (
            {"algorithm": {"transform_mode": "gtpo_sepa"}, "training": {"max_steps": 500}},
            "reaches at most 0.898",
        ),
        (
            {"backpressure": {"enabled": True, "max_batch_size": 32}},
            "from 2 to between 1 and 32 prompts per step",
        ),
    ],
    ids=["D29", "an own loss", "the default ramp", "back pressure"],
)
def test_what_may_surprise_in_a_run_is_a_warning(
    tmp_path: Path, sections: dict[str, Any], words: str
) -> None:
    assert not explain(small(tmp_path)).warnings
    found = explain(small(tmp_path, **sections)).warnings
    (warning,) = [one for one in found if "of the gradient" not in one]
    assert words in warning


def test_a_default_that_nobody_chose_is_no_warning() -> None:
    config = config_from_mapping({"model": {"model": "lab"}, "data": {"source": "lab"}})
    stored = config_from_toml(dump_toml(config))
    assert not notes(config) and notes(stored)
    assert not notes(replaced(stored, {"resume.from": "logs/lab"}))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"loss": {"mode": "gspo"}}, True),
        ({"loss": {"mode": "gspo", "old_logprobs": "sampler"}}, False),
        ({"loss": {"mode": "gspo", "old_logprobs": "recomputed"}}, True),
        ({"loss": {"mode": "cispo"}}, True),
        ({"loss": {"mode": "cispo", "clip_high": 0.5}}, False),
        ({"loss": {"mode": "cispo", "clip_low": 1.0, "clip_high": 2.0}}, False),
        ({"loss": {"mode": "ppo", "clip_high": 0.0}}, False),
        ({"loss": {"mode": "ppo"}, "lora": {"dropout": 0.1}}, False),
        ({"loss": {"mode": "ppo"}, "backend": {"devices": "gpu:0,gpu:1"}}, False),
        ({"loss": {"mode": "ppo"}, "training": {"minibatches": 2}}, False),
        ({"loss": {"mode": "ppo"}, "schedule": {"loss.clip_low": [[0, 0.2], [5, 0.0]]}}, False),
        ({"loss": {"mode": "ppo"}, "schedule": {"loss.clip_low": [[0, 0.2], [5, 0.1]]}}, True),
    ],
    ids=str,
)
def test_one_gradient_of_all_modes_is_claimed_only_where_no_ratio_can_reach_the_clip(
    tmp_path: Path, sections: dict[str, Any], said: bool
) -> None:
    found = " ".join(notes(small(tmp_path, **sections)))
    assert ("with one update per step never clips" in found) is said


@pytest.mark.parametrize(
    ("base", "sections", "said"),
    [
        ("lab", {}, []),
        ("lab2", {}, ["belongs to the base model lab2, and [model] model is lab"]),
        ("elsewhere/lab", {"model": {"model": "lab2"}}, ["belongs to the base model elsewhere"]),
        ("", {"loss": {"kl_coef": 0.1}}, ['set [loss] kl_reference = "start"']),
        ("..", {"model": {"model": "./.."}}, []),
        ("", {"schedule": {"loss.kl_coef": [[0, 0.0], [9, 0.1]]}}, ["pulls toward the base"]),
    ],
)
def test_what_an_initial_adapter_brings_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    base: str,
    sections: dict[str, Any],
    said: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    found = [
        note
        for note in notes(small(tmp_path / "run", lora={"init_from": str(tmp_path)}, **sections))
        if "init_from" in note
    ]
    assert [words in note for words, note in zip(said, found, strict=True)] == [True] * len(said)


def test_a_mask_that_a_schedule_lifts_is_warned_of_on_a_model_that_is_sure(tmp_path: Path) -> None:
    masked = {"schedule": {"algorithm.surprisal_mask_rho": [[0, 0.0], [5, 0.2]]}}
    for sections, said in (({}, False), (masked, True)):
        found = notes(small(tmp_path, **sections))
        assert any("of the gradient" in note for note in found) is said


# -- time and cost ---------------------------------------------------------------------------------


def planned(settings: dict[str, Any]) -> CampaignPlan:
    return plan_campaign(campaign(campaign=settings), Path("campaign"))


@pytest.mark.parametrize(
    ("settings", "parallelism"),
    [({}, 1), ({"parallel": True, "max_workers": 12}, 12), ({"parallel": True}, 40)],
)
def test_the_formulas_of_capacity_planning(settings: dict[str, Any], parallelism: int) -> None:
    plan = schedule_campaign(
        planned(settings), 0, None, StepTime(10.0, "given"), price_per_hour=1.5
    )
    assert plan.total_campaign_steps == 2000
    assert plan.effective_parallelism == parallelism
    assert plan.estimated_wall_time_s == pytest.approx(2000 * 10 / parallelism)
    assert plan.device_hours == pytest.approx(2000 * 10 / 3600)
    assert plan.cost == pytest.approx(2000 * 10 / 3600 * 1.5)


def test_runs_that_share_a_device_pay_for_it_once() -> None:
    settings = {"parallel": True, "workers_per_device": 2, "price_per_hour": 3.0}
    plan = schedule_campaign(
        planned(settings), 0, None, StepTime(36.0, "given"), price_per_hour=None
    )
    assert plan.device_hours == pytest.approx(10) and plan.cost == pytest.approx(30)


def test_no_more_workers_are_recommended_than_runs_calls_or_memory(tmp_path: Path) -> None:
    only = {"advantage_mode": "grpo", "transform_mode": "none"}
    for config, count, because in (
        (campaign(backend={"backend": "tinker", "max_concurrent": 4}), 4, "max_concurrent"),
        (campaign(campaign={"seeds": [1], "conditions": [only]}), 1, ""),
    ):
        schedule = explain(config).schedule
        assert schedule is not None and schedule.recommended is not None
        assert schedule.recommended.count == count and because in schedule.recommended.because


def test_the_step_time_of_a_pilot_is_the_median_over_all_its_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = small_run(small(tmp_path / "pilot" / "run", training={"max_steps": 3}), quiet=True)
    times = sorted(line["step_time_s"] for line in lines(run.folder / "metrics.jsonl"))
    file = write(tmp_path, small(tmp_path / "next", training={"max_steps": 100}))
    seen = explained(capsys, file, "--pilot", tmp_path / "pilot", "--price-per-hour", "2")
    assert seen["schedule"]["median_step_time_s"] == pytest.approx(times[1])
    assert seen["schedule"]["estimated_wall_time_s"] == pytest.approx(100 * times[1])
    assert seen["schedule"]["cost"] == pytest.approx(100 * times[1] / 3600 * 2)
    assert seen["warnings"] == []
    seen = explained(capsys, file, "--pilot", tmp_path / "pilot", "--batch-size", "4")
    assert "[training] batch_size = 2; here it is 4" in seen["warnings"][0]


def test_a_probe_measures_one_step_and_leaves_nothing_behind(tmp_path: Path) -> None:
    config = small(tmp_path / "run", backend={"adapter_path": str(tmp_path / "adapters")})
    seen = explain(config, probe=True)
    assert seen.schedule is not None and seen.schedule.step_time is not None
    assert 0 < seen.schedule.step_time.seconds < 60
    assert seen.schedule.estimated_wall_time_s == pytest.approx(4 * seen.schedule.step_time.seconds)
    assert not list(tmp_path.iterdir())


def test_a_pilot_that_shows_nothing_is_refused(tmp_path: Path) -> None:
    for pilot in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigurationError):
            explain(small(tmp_path / "run"), pilot=pilot)


# -- what the seeds can find -----------------------------------------------------------------------


def test_seeds_that_cannot_conclude_are_said_with_the_number_that_could() -> None:
    few = explain(campaign(campaign={"seeds": [1, 2, 3, 4]}))
    assert few.power is not None and few.power.detectable is None and few.power.seeds_needed == 6
    (warning,) = [sentence for sentence in few.warnings if "for a verdict" in sentence]
    assert "4 seeds" in warning and "4 comparisons" in warning and "6 seeds" in warning
    assert "use 7" in warning
    least = explain(campaign(campaign={"seeds": [1, 2, 3, 4, 5, 6]}))
    assert [sentence for sentence in least.warnings if "use 7, in case one run fails" in sentence]
    assert not [one for one in explain(campaign()).warnings if "in case one run fails" in one]


def test_the_spread_of_a_pilot_gives_the_difference_that_the_seeds_find(tmp_path: Path) -> None:
    pilot = write_campaign(
        tmp_path, {"grpo+none": [50, 52, 54, 50], "maxrl+none": [55, 54, 60, 58]}
    )
    for run in (pilot / "runs").iterdir():  # written without times
        metrics = run / "metrics.jsonl"
        metrics.write_text(
            "".join(json.dumps(line | {"step_time_s": 2.0}) + "\n" for line in lines(metrics))
        )
    seen, without = explain(campaign(), pilot=pilot), explain(campaign())
    assert seen.power is not None and seen.power.metric == "pass@1"
    assert without.power is not None and without.power.metric is None
    assert seen.power.detectable is not None and without.power.detectable is not None
    assert seen.power.detectable == pytest.approx(
        without.power.detectable * 0.025, rel=1e-2
    )  # differences of 5, 2, 6 and 8 points


# -- the command -----------------------------------------------------------------------------------


def test_the_text_is_aligned_and_leaves_out_what_is_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(write(tmp_path, small(tmp_path / "run")))]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Run: maxrl+none, seed 3, 4 steps\n")
    assert not any(title in text for title in ("Warnings", "refused", "Conditions", "  cost"))
    assert all(line == line.rstrip() and len(line) <= 140 for line in text.splitlines())
    memory = text.split("Memory\n")[1].split("\n\n")[0].splitlines()
    assert len({line.index("iB") for line in memory}) == 1


def test_the_file_may_stand_before_or_behind_the_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, small(tmp_path / "run"))
    for arguments in (
        [file, "--lr", "0.5"],
        ["--lr", "0.5", file],
        ["--lr=0.5", "--pilot", write_pilot(tmp_path), file],
    ):
        values = {item["key"]: item["value"] for item in explained(capsys, *arguments)["settings"]}
        assert values["training.lr"] == 0.5


def write_pilot(folder: Path) -> Path:
    run = write_run(folder / "pilot", 1, held_out=problems([1]))
    metrics = run / "metrics.jsonl"
    metrics.write_text(
        "".join(json.dumps(line | {"step_time_s": 1.0}) + "\n" for line in lines(metrics))
    )
    return run


def test_an_absent_device_leaves_the_rest_and_a_size_stands_in_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, small(tmp_path / "run", backend={"devices": "gpu:7"}))
    seen = explained(capsys, file, code=3)
    assert seen["memory"] is None and "gpu:7" in seen["memory_unknown"]
    assert "--memory-gib" in seen["memory_unknown"]
    seen = explained(capsys, file, "--memory-gib", "24")
    assert seen["memory"]["device"] == "cuda:7" and seen["memory"]["device_gib"] == 24


@pytest.mark.parametrize("arguments", [["a.toml", "b.toml"], ["--nonsense", "1"], ["absent.toml"]])
def test_wrong_usage_is_one_sentence(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *arguments]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1

"""Running campaigns: sequential in this process, parallel as subprocesses; stopped, killed and
resumed.
"""

import errno
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from retrain import load_runs
from retrain.analysis.integrity import problem_of
from retrain.analysis.planned import CampaignRecord
from retrain.analysis.runs import StoredRun, campaign_runs, find_runs
from retrain.analysis.status import run_status
from retrain.campaign import CampaignPlan, Manifest, Status, plan_campaign, run_campaign
from retrain.campaign.launch import RunOutcome, share_devices, start_worker, visible
from retrain.config import TrainConfig, config_from_mapping, load_config, replaced
from retrain.errors import ConfigurationError, RunFailed
from retrain.explain import explain
from retrain.records.run_folder import Liveness, RunFolder, Writer, mark, writer_lock
from retrain.run.interrupts import Interrupts
from tests import commands
from tests.campaigns import CAMPAIGN, sections, write_run
from tests.runs import lines, small_run, timeless

NAMES = ["grpo+none_s1", "weighted_s1", "grpo+none_s2", "weighted_s2"]


def write_toml(path: Path, content: dict[str, Any]) -> Path:
    from tomlkit import dumps

    path.write_text(dumps(content), encoding="utf-8")
    return path


def planned(
    folder: Path, campaign: dict[str, Any] | None = None, **others: dict[str, Any]
) -> TrainConfig:
    return config_from_mapping(sections(folder, campaign, **others))


def plan_of(folder: Path, campaign: dict[str, Any] | None = None) -> CampaignPlan:
    return plan_campaign(planned(folder, campaign), folder)


@dataclass
class Finished:
    folder: Path
    printed: str


@pytest.fixture(scope="module")
def sequential(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """2 conditions x 2 seeds x 2 steps, one after the other in this process, with auto-squeeze."""
    folder = tmp_path_factory.mktemp("sequential") / "campaign"
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr("retrain.campaign.board.Board.say", lambda board, line: said.append(line))
        run_campaign(planned(folder, squeeze={"min_variance_retention": 0.9}))
    return Finished(folder, "\n".join(said))


# -- what a campaign leaves ------------------------------------------------------------------------


def test_the_manifest_tells_the_whole_campaign(sequential: Finished) -> None:
    manifest = json.loads((sequential.folder / "manifest.json").read_text())
    named = "timestamp retrain_version config conditions seeds max_steps runs squeeze plan looks"
    assert manifest.keys() == {*named.split(), "heldout_sha256", "command"}
    assert re.fullmatch(r"\d{8}_\d{6}", manifest["timestamp"])
    assert (manifest["conditions"], manifest["max_steps"]) == (["grpo+none", "weighted"], 2)
    assert manifest["seeds"] == [1, 2]
    assert [run["name"] for run in manifest["runs"]] == NAMES
    for run in manifest["runs"]:
        assert list(run)[:5] == ["name", "condition", "seed", "status", "dir"]
        assert list(run)[5:] == ["started", "ended", "reason", "attempts"]
        assert run["status"] == "done" and run["reason"] is None and run["started"] <= run["ended"]
        assert (sequential.folder / run["dir"] / "summary.json").is_file()
    assert config_from_mapping(manifest["config"]).conditions[1].sets == {"gtpo.beta": 0.3}


def test_every_run_has_its_own_log_and_adapter(sequential: Finished) -> None:
    folders = [sequential.folder / "runs" / name for name in NAMES]
    final = "checkpoints/final/adapter_model.safetensors"
    assert len({(folder / final).read_bytes() for folder in folders}) == 4
    for folder in folders:
        steps = [(line["step"], line["condition"]) for line in lines(folder / "metrics.jsonl")]
        assert steps == [(0, folder.name[:-3]), (1, folder.name[:-3])]
        assert {line["step"] for line in lines(folder / "evaluation.jsonl")} == {2}
        assert "Parity gate passed" in (folder / "output.log").read_text()


def test_one_seed_gives_every_condition_the_same_prompts_and_noise(sequential: Finished) -> None:
    def drawn(name: str) -> list[tuple[Any, ...]]:
        records = lines(sequential.folder / "runs" / name / "emergence/generations.jsonl")
        return [
            (record["prompt_id"], record["sample"], record["completion"])
            for record in records
            if record["step"] == 0
        ]

    assert drawn("grpo+none_s1") == drawn("weighted_s1") != drawn("grpo+none_s2")


def test_the_tasks_of_an_array_train_the_runs_of_the_campaign(
    sequential: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = planned(tmp_path / "c", {"launcher": "array", "seeds": [1]})
    assert {entry.status for entry in run_campaign(config).runs} == {Status.PENDING}
    again = replaced(config, {"resume.from": str(tmp_path / "c")}, origin="flag")
    for number in ("", "2", "-1", "a", "1", "0", "0"):
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", number)
        refused = pytest.raises(ConfigurationError, match="set it to one from 0 to 1, or unset it")
        with refused if number in ("2", "-1", "a") else nullcontext():
            run_campaign(again)
    for name in NAMES[:2]:
        adapter = f"runs/{name}/checkpoints/final/adapter_model.safetensors"
        assert (tmp_path / "c" / adapter).read_bytes() == (sequential.folder / adapter).read_bytes()
    ended = run_campaign(replaced(again, {"campaign.launcher": "local"}, origin="flag")).runs
    assert {(entry.status, entry.started) for entry in ended} == {(Status.DONE, None)}


def test_the_plan_numbers_the_tasks_of_an_array_even_if_the_file_has_more_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = planned(tmp_path / "c", {"launcher": "array"})
    given = {"resume.from": str(tmp_path / "c"), "campaign.seeds": [3, 1, 2]}
    later = replaced(config, given, origin="flag")
    monkeypatch.setattr("retrain.campaign.launch.perform", lambda run: RunOutcome(Status.FAILED))
    told = {"9" * 9999: "no", "4": "no run", "0": "grpo.none_s1: "}
    for number, words in (("0", "is not a campaign"), *told.items()):
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", number)
        with pytest.raises((ConfigurationError, RunFailed), match=words):
            run_campaign(later)
        monkeypatch.delenv("SLURM_ARRAY_TASK_ID")
        if "campaign" in words:
            run_campaign(config)


def test_the_plan_of_an_array_forgets_earlier_failures(
    sequential: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tasks write no manifest.json, so the failure of an earlier session would stay."""
    folder = tmp_path / "it is here"
    shutil.copytree(sequential.folder, folder)
    (folder / "runs" / NAMES[1] / "summary.json").unlink()
    manifest = Manifest.read(folder)
    for name, status in zip(NAMES, ("failed", "failed", "interrupted", "done"), strict=True):
        manifest[name].status = Status(status)
    manifest.write()
    resume = {"from": str(folder)}
    entries = run_campaign(planned(folder, {"launcher": "array"}, resume=resume)).runs
    assert [entry.status for entry in entries] == ["done", "pending", "done", "done"]
    assert [run.status for run in Manifest.read(folder).runs] == [run.status for run in entries]
    assert f"`retrain status '{folder}' --watch`" in capsys.readouterr().out


def test_a_run_that_shared_the_loaded_model_is_the_run_alone(
    sequential: Finished, tmp_path: Path
) -> None:
    """The last run's model had three adapters before."""
    (run,) = [run for run in plan_of(tmp_path).runs if run.name == NAMES[3]]
    small_run(run.config, quiet=True)
    assert_same_runs(tmp_path, sequential.folder, NAMES[3:])


def test_the_first_adapter_is_squeezed_printed_and_kept_in_the_manifest(
    sequential: Finished,
) -> None:
    from retrain.squeeze import analyze_adapter

    squeeze = json.loads((sequential.folder / "manifest.json").read_text())["squeeze"]
    adapter = sequential.folder / "runs" / NAMES[0] / "checkpoints/final"
    analysis = analyze_adapter(adapter, min_variance_retention=0.9)
    assert squeeze == json.loads(json.dumps(analysis.to_json()))
    assert f"Recommended rank: {analysis.recommended_rank}" in sequential.printed


def test_the_comparison_is_printed_at_the_end(sequential: Finished) -> None:
    table = re.split(r"^condition\s+pairs +difference", sequential.printed, flags=re.MULTILINE)
    assert len(table) == 2 and "\nweighted\n" in table[1]


def test_reading_runs_finds_the_campaigns_and_no_checkpoint(sequential: Finished) -> None:
    assert [run.name for run in find_runs(sequential.folder)] == NAMES
    assert [run.name for run in find_runs(sequential.folder.parent)] == NAMES
    frame = load_runs(sequential.folder)
    assert len(frame) == 8 and set(frame["condition"]) == {"grpo+none", "weighted"}


def test_a_finished_campaign_taken_up_again_runs_nothing(
    sequential: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = sequential.folder

    def times() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/metrics.jsonl")}

    before = times()
    run_campaign(planned(folder, resume={"from": str(folder)}))
    assert times() == before and len(before) == 4
    printed = capsys.readouterr().out
    assert "4 of them finished before" in printed and "started" not in printed


@dataclass
class HalfAStepAnHour:
    """A campaign of one run of two steps, whose training takes half a step an hour."""

    folder: Path
    began: list[str] = field(default_factory=list)
    """What each session resumed."""

    def train(self, config: TrainConfig) -> None:
        self.began.append(config.resume.from_)
        training = config.training
        hours = min(training.max_hours, 2 * training.max_steps)
        write_run(
            Path(config.logging.log_dir),
            training.seed,
            [0.5] * int(hours / 2),
            max_steps=training.max_steps,
            seconds=3600 * hours,
            algorithm=config.algorithm.model_dump(exclude_unset=True),
            training={"max_hours": training.max_hours},
        )

    def run(self, hours: float, *, again: bool = True) -> Status:
        campaign = {"seeds": [1], "conditions": CAMPAIGN["conditions"][:1]}
        more = {"resume": {"from": str(self.folder)}} if again else {}
        hourly = {"training": {"max_hours": hours}}
        run_campaign(planned(self.folder, campaign, **hourly, **more))
        return Manifest.read(self.folder)["grpo+none_s1"].status

    @property
    def stored(self) -> StoredRun:
        (run,) = campaign_runs(self.folder)
        return run


@pytest.fixture
def hourly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HalfAStepAnHour:
    """The campaign after its first session, which had two hours."""
    campaign = HalfAStepAnHour(tmp_path / "c")
    monkeypatch.setattr("retrain.run.loop.train", campaign.train)
    with pytest.raises(RunFailed, match=TWO_HOURS):
        campaign.run(2.0, again=False)
    return campaign


TWO_HOURS = (
    r"grpo\+none_s1 \(interrupted: \[training\] max_hours = 2 came after 1 of 2 steps; give more"
    " hours, such as --max-hours 4"
)


def test_a_run_that_max_hours_ends_is_not_done_and_waits_for_more_hours(
    hourly: HalfAStepAnHour,
) -> None:
    with pytest.raises(RunFailed, match=TWO_HOURS):
        hourly.run(2.0)
    stored = hourly.stored
    assert stored.planned
    said = run_status(stored, time.time()).note
    assert f"was stopped ({stored.planned.reason})." in said
    assert "--max-hours 4" in stored.planned.reason
    failed = replace(stored, planned=replace(stored.planned, status="failed"))
    assert not problem_of(failed, {})  # it could not go on
    assert len(hourly.began) == 1
    assert hourly.run(9.0) is Status.DONE
    assert hourly.began[1:] == [str(hourly.folder / "runs" / "grpo+none_s1")]


def test_status_tells_of_the_hours_of_a_run_that_was_then_continued_alone(
    hourly: HalfAStepAnHour,
) -> None:
    """The manifest still has the reason of the campaign's session."""
    hourly.train(
        replaced(hourly.stored.config, {"training.max_hours": 5.0, "training.max_steps": 4})
    )
    note = run_status(hourly.stored, time.time()).note
    assert "max_hours = 5 came after 2 of 4 steps; give more hours, such as --max-hours 10" in note


@pytest.mark.parametrize("damage", ["{", "{}", '{"status": "done", "steps": 1}'])
def test_a_run_with_a_damaged_summary_goes_on_and_writes_it_anew(
    hourly: HalfAStepAnHour, damage: str
) -> None:
    hourly.stored.folder.summary.write_text(damage, encoding="utf-8")
    with pytest.raises(RunFailed, match=TWO_HOURS):
        hourly.run(2.0)
    assert len(hourly.began) == 2
    assert hourly.stored.summary["seconds"] == 7200


# -- runs that fail --------------------------------------------------------------------------------


def test_a_failing_run_does_not_stop_the_others_and_is_told_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = CAMPAIGN["conditions"][0]
    broken = usual | {"label": "broken", "lora.init_from": "nowhere"}
    campaign = {"seeds": [1], "conditions": [broken, usual], "max_steps": 1}
    with pytest.raises(RunFailed, match=r"1 of 2 runs did not finish.*broken_s1") as caught:
        run_campaign(planned(tmp_path / "c", campaign))
    assert caught.value.exit_code == 1
    failed, done = Manifest.read(tmp_path / "c").runs
    assert (failed.status, done.status) == (Status.FAILED, Status.DONE)
    assert failed.reason and 'init_from = "nowhere"' in failed.reason
    printed = capsys.readouterr().out
    assert "[1/2] broken_s1 failed" in printed and 'init_from = "nowhere"' in printed
    assert "[2/2] grpo+none_s1 done: step 1/1" in printed


@pytest.mark.slow
def test_a_bug_in_one_run_is_that_runs_failure(tmp_path: Path) -> None:
    usual = CAMPAIGN["conditions"][0]
    bug = usual | {"advantage_mode": "badplugin.advantage", "label": "bug"}
    campaign = {"seeds": [1], "conditions": [bug, usual], "max_steps": 1}
    # The trial before the campaign has groups of two and three.
    (tmp_path / "badplugin.py").write_text(
        "def advantage(rewards):\n"
        "    if len(rewards) > 3:\n"
        "        raise TypeError('a bug')\n"
        "    return [0.0] * len(rewards)\n"
    )
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RunFailed, match="bug_s1"):
        patch.syspath_prepend(str(tmp_path))
        run_campaign(planned(tmp_path / "c", campaign), quiet=True)
    statuses = [entry.status for entry in Manifest.read(tmp_path / "c").runs]
    assert statuses == [Status.FAILED, Status.DONE]


def no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.slow
def test_a_run_whose_output_cannot_be_written_fails_and_the_next_one_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrain.campaign.launch.output_to", no_room)
    stagger = {"stagger_seconds": 3600}  # which is for workers
    with pytest.raises(RunFailed, match="4 of 4 runs did not finish"):
        run_campaign(planned(tmp_path / "c", stagger), quiet=True)
    said = "output.log is not writable (No space left on device); free space there"
    for entry in Manifest.read(tmp_path / "c").runs:
        assert entry.status is Status.FAILED
        assert entry.reason == f"{tmp_path}/c/runs/{entry.name}/{said}"


def manifest_of(folder: Path, changes: dict[str, Any]) -> Manifest:
    """The manifest of a campaign in `folder`, changed there by hand."""
    manifest = Manifest.of_plan(plan_of(folder), datetime.now())
    manifest.write()
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes), encoding="utf-8")
    return manifest


RUN = {"name": NAMES[0], "condition": "grpo+none", "seed": 1, "status": "failed"}


def test_a_manifest_that_cannot_be_written_now_is_written_with_the_next_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = manifest_of(tmp_path, {})
    with monkeypatch.context() as full:
        full.setattr("retrain.campaign.manifest.replace_file", no_room)
        manifest.started(NAMES[0])
        manifest.ended(NAMES[0], Status.DONE)
    (note,) = manifest.notes
    assert note.startswith(f"{tmp_path}/manifest.json is not writable (No space left on device);")
    assert Manifest.read(tmp_path)[NAMES[0]].status is Status.PENDING
    manifest.started(NAMES[1])
    statuses = [entry.status for entry in Manifest.read(tmp_path).runs[:2]]
    assert statuses == [Status.DONE, Status.RUNNING]


DAMAGED = [
    ({"config": None}, "has config = None, which no campaign wrote"),
    ({"later": 1}, "has later = 1, which no campaign wrote"),
    ({"runs": [{"name": "grpo+none_s1"}]}, "has no runs.0.condition, which every campaign writes"),
    ({"runs": [RUN | {"dir": None}]}, "has runs.0.dir = None, which no campaign wrote"),
    ({"runs": [RUN | {"reason": 7}]}, "has runs.0.reason = 7, which no campaign wrote"),
    ({"runs": [RUN | {"later": 1}]}, "has runs.0.later = 1, which no campaign wrote"),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGED)
def test_a_manifest_that_no_campaign_wrote_is_refused_by_its_place(
    tmp_path: Path, damage: dict[str, Any], said: str
) -> None:
    manifest_of(tmp_path, damage)
    with pytest.raises(RunFailed, match=re.escape(f"{tmp_path}/manifest.json {said}")):
        Manifest.read(tmp_path)


def test_a_campaign_goes_on_after_a_reason_with_half_a_character(tmp_path: Path) -> None:
    """As a server's JSON may hold it, and an error that quotes that."""
    manifest_of(tmp_path, {"runs": [RUN | {"reason": "no reward for '\ud83d'"}]})
    assert CampaignRecord.read(tmp_path).plan
    assert Manifest.read(tmp_path)[NAMES[0]].reason == "no reward for '?'"


# -- refusals before anything is made --------------------------------------------------------------


def refused(folder: Path, campaign: dict[str, Any] | None = None, **others: dict[str, Any]) -> str:
    config = planned(folder, campaign, **others)
    with pytest.raises(ConfigurationError) as caught:
        run_campaign(config, quiet=True)
    if config.resume.from_:
        assert explain(config).refused == caught.value.problems
    return str(caught.value)


def test_a_campaign_never_starts_in_anothers_folder(sequential: Finished) -> None:
    assert f"--resume {sequential.folder}`" in refused(sequential.folder)
    assert "of the kind run; choose" in refused(sequential.folder / "runs" / NAMES[0])
    with writer_lock(RunFolder(sequential.folder)):  # one that goes on cannot be resumed
        assert f"is being written by pid {os.getpid()} on" in refused(sequential.folder)


def test_a_campaign_takes_no_folder_of_another_kind(tmp_path: Path) -> None:
    for kind in ("run", "squeeze", "evaluation"):
        mark(tmp_path / kind, kind)
        assert f"{tmp_path / kind} is a folder of the kind {kind};" in refused(tmp_path / kind)


@pytest.mark.parametrize(
    ("campaign", "sections", "said"),
    [
        ({"margin": 0.05}, {}, r"margin = 0\.05: the plan of .* has 0\.02, "),
        ({"margin": None}, {}, r"margin = none: the plan of .* has 0\.02, "),
        ({}, {"evaluation": {"samples": 3}}, r"samples = 3 differs from 1, .* cannot change"),
        ({"max_steps": 1}, {}, r"max_steps = 1: the plan of .* has 2\. Restore"),
        ({"conditions": CAMPAIGN["conditions"][::-1]}, {}, r"baseline \(the first .* --baseline"),
    ],
)
def test_a_resume_keeps_what_the_plan_compares(
    campaign: dict[str, Any], sections: dict[str, Any], said: str, tmp_path: Path
) -> None:
    begun = {"margin": 0.02}
    manifest = Manifest.of_plan(plan_of(tmp_path, begun), datetime.now())
    with pytest.raises(ConfigurationError, match=said):
        manifest.resumed_with(
            plan_campaign(planned(tmp_path, begun | campaign, **sections), tmp_path)
        )


def test_a_run_takes_two_devices_at_most() -> None:
    with pytest.raises(ConfigurationError, match="devices_per_run = 3 is out of range"):
        planned(Path("c"), {"devices_per_run": 3})


def test_of_two_campaigns_in_one_folder_the_later_one_does_not_replace_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one began and ended while this one planned its runs."""

    def plan(config: TrainConfig, folder: Path) -> CampaignPlan:
        folder.mkdir()
        (folder / "manifest.json").write_text("the other's")
        return plan_campaign(config, folder)

    monkeypatch.setattr("retrain.campaign.manifest.plan_campaign", plan)
    assert "already holds a campaign" in refused(tmp_path / "c")
    assert (tmp_path / "c" / "manifest.json").read_text() == "the other's"


def test_what_would_change_the_campaign_is_refused_at_resume(
    sequential: Finished, tmp_path: Path
) -> None:
    folder, resume = sequential.folder, {"from": str(sequential.folder)}
    assert "lr = 0.5 differs from 0.001" in refused(folder, training={"lr": 0.5}, resume=resume)
    assert "which the file no longer plans" in refused(folder, {"seeds": [1]}, resume=resume)
    conditions = [CAMPAIGN["conditions"][0], CAMPAIGN["conditions"][1] | {"gtpo.beta": 0.1}]
    other_beta = refused(folder, {"conditions": conditions}, resume=resume)
    assert "beta = 0.1 differs from 0.3" in other_beta
    run = {"from": str(folder / "runs" / NAMES[0])}
    assert "name a campaign's folder" in refused(folder, resume=run)
    shutil.copytree(folder, tmp_path / "c")
    (tmp_path / "c" / "manifest.json").write_text('{"runs": [{}]}')
    damaged = explain(planned(tmp_path / "c", resume={"from": str(tmp_path / "c")})).refused
    assert "manifest.json has" in damaged[0]


def test_what_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    problems = tmp_path / "problems.jsonl"
    problems.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4)
    data, asked = {"source": str(problems)}, {"at_end": True}
    assert "has no held-out split" in refused(tmp_path / "c", data=data, evaluation=asked)
    assert not (tmp_path / "c").exists()


def test_a_campaign_is_no_single_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is a campaign, not a single run"):
        small_run(planned(tmp_path / "c"), quiet=True)


def test_a_run_never_starts_in_a_campaigns_folder(sequential: Finished) -> None:
    folder = sequential.folder
    run = plan_of(folder).runs[0].config
    for key in ("resume.from", "logging.log_dir"):
        with pytest.raises(ConfigurationError, match="holds a campaign, not a single run"):
            small_run(replaced(run, {key: str(folder)}), quiet=True)


def test_a_campaign_with_an_algorithm_can_be_resumed(tmp_path: Path) -> None:
    """Its base and its condition differ in the loss's aggregation, which neither was given."""
    algorithm = {"conditions": [{"algorithm_mode": "grpo_constant"}]}
    plan = plan_of(tmp_path, algorithm)
    manifest = Manifest.of_plan(plan, datetime.now())
    manifest.write()
    Manifest.read(tmp_path).resumed_with(plan)
    assert config_from_mapping(manifest.config) == planned(tmp_path, algorithm)


def test_seeds_conditions_and_steps_may_be_added(tmp_path: Path) -> None:
    manifest = Manifest.of_plan(plan_of(tmp_path), datetime.now())
    manifest.ended(NAMES[0], Status.DONE)
    more = CAMPAIGN["conditions"] + [{"advantage_mode": "rloo", "transform_mode": "none"}]
    after = plan_of(tmp_path, {"seeds": [1, 2, 3], "conditions": more, "max_steps": 3})
    manifest.resumed_with(after)
    assert [entry.name for entry in manifest.runs] == [run.name for run in after.runs]
    assert (len(manifest.runs), manifest.max_steps) == (9, 3)
    assert manifest[NAMES[0]].status is Status.DONE


def test_the_default_evaluation_is_left_out_where_nothing_is_held_out(tmp_path: Path) -> None:
    from retrain.campaign.plan import check, evaluated_where_possible

    problems = tmp_path / "problems.jsonl"
    problems.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4)
    own = {"source": str(problems)}
    for data, place in ((own, f"source = '{problems}'"), ({"mix": [own]}, "mix")):
        plan = plan_campaign(config_from_mapping(sections(tmp_path) | {"data": data}), tmp_path)
        checked = check(plan)
        line = f"The runs end without a held-out evaluation: [data] {place} holds nothing out."
        assert line in checked.lines
        after = evaluated_where_possible(plan, checked).runs
        assert not any(run.config.evaluation.asked_for for run in after)


def test_folders_made_in_one_second_are_numbered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from retrain.campaign.manifest import open_campaign
    from retrain.campaign.plan import check

    monkeypatch.chdir(tmp_path)
    values = {key: value for key, value in sections(tmp_path).items() if key != "logging"}
    config = config_from_mapping(values)
    checked = check(plan_campaign(config, Path("campaign")))
    monkeypatch.setattr("retrain.campaign.manifest.TIMESTAMP", "20261121_120000")
    for end in ("", "-2", "-3"):
        with open_campaign(config, checked) as (plan, manifest):
            assert plan.folder == Path(f"logs/campaign_20261121_120000{end}") and manifest.timestamp
            statuses = [entry.status for entry in Manifest.read(plan.folder).runs]
            assert statuses == [Status.PENDING] * 4


# -- devices ---------------------------------------------------------------------------------------


def slots(monkeypatch: pytest.MonkeyPatch, gpus: int, **campaign: Any) -> list[tuple[str, ...]]:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    values = sections(Path("c"), {"parallel": True, **campaign})
    values["backend"] = {}
    return share_devices(plan_campaign(config_from_mapping(values), Path("c")))


def test_parallel_runs_take_the_devices_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slots(monkeypatch, 2) == [("cuda:0",), ("cuda:1",)]
    assert slots(monkeypatch, 4, devices_per_run=2) == [("cuda:0", "cuda:1"), ("cuda:2", "cuda:3")]
    assert slots(monkeypatch, 2, workers_per_device=2) == [("cuda:0",), ("cuda:1",)] * 2
    assert slots(monkeypatch, 2, max_workers=1) == [("cuda:0",)]


@pytest.mark.parametrize(
    ("given", "devices", "expected"),
    [
        (None, ("cuda:1",), "1"),
        (None, ("cuda:2", "cuda:3"), "2,3"),
        ("4,GPU-8932", ("cuda:1",), "GPU-8932"),
        ("4,6", ("cuda:0", "cuda:1"), "4,6"),
        ("4,6", (), "4,6"),
        (None, (), None),
    ],
)
def test_a_worker_sees_its_own_gpus_alone(
    given: str | None, devices: tuple[str, ...], expected: str | None
) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": given} if given else {}
    assert (environ | visible(devices, environ)).get("CUDA_VISIBLE_DEVICES") == expected


def test_more_workers_than_gpus_are_refused_unless_the_file_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigurationError, match=r"4 exceeds the 2 runs.*workers_per_device = 2"):
        slots(monkeypatch, 2, max_workers=4)
    with pytest.raises(ConfigurationError, match="run = 2 exceeds the number of devices"):
        slots(monkeypatch, 1, devices_per_run=2)


def test_without_gpus_every_run_may_have_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slots(monkeypatch, 0) == [()] * 4
    assert slots(monkeypatch, 0, max_workers=3) == [()] * 3


# -- processes: parallel, stopped, killed ----------------------------------------------------------


@dataclass
class Started:
    folder: Path
    process: commands.Command

    @property
    def manifest(self) -> Manifest:
        return Manifest.read(self.folder)

    def wait_for(self, event: Any, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not event():
            assert time.monotonic() < deadline, "nothing happened"
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)

    def steps(self, name: str) -> int:
        metrics = self.folder / "runs" / name / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def worker(self, name: str) -> int:
        """The process that writes a run; 0 while there is none."""
        owner = self.folder / "runs" / name / ".lock.owner"
        return int(owner.read_text().split()[1]) if owner.exists() and owner.read_text() else 0


def command(file: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "retrain", str(file), *flags]


def environment() -> dict[str, str]:
    """The last bits of a sum depend on the number of threads, so the processes have as many as this
    one.
    """
    return os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}


def start(folder: Path, *flags: str, **campaign: Any) -> Started:
    file = write_toml(folder.with_suffix(".toml"), sections(folder, campaign))
    env = environment() | {OF_CAMPAIGN: str(folder)}
    return Started(
        folder, commands.Command(command(file, *flags), env=env, stderr=subprocess.STDOUT)
    )


def assert_same_runs(folder: Path, undisturbed: Path, names: list[str]) -> None:
    for name in names:
        ours, theirs = (root / "runs" / name for root in (folder, undisturbed))
        assert timeless(ours / "metrics.jsonl") == timeless(theirs / "metrics.jsonl"), name
        for file in ("evaluation.jsonl", "checkpoints/final/adapter_model.safetensors"):
            assert (ours / file).read_bytes() == (theirs / file).read_bytes(), (name, file)


def resume(folder: Path, *flags: str) -> str:
    return commands.run(
        command(folder.with_suffix(".toml"), "--resume", str(folder), *flags),
        env=environment(),
        check=True,
    ).stdout


@pytest.mark.faults("campaigns and workers killed")
@pytest.mark.slow
def test_a_lost_worker_starts_again_and_a_killed_campaign_loses_nothing(
    sequential: Finished, tmp_path: Path
) -> None:
    names = NAMES[:2]
    campaign = start(tmp_path / "c", "--seed", "1", parallel=True)
    campaign.wait_for(
        lambda: campaign.worker(names[1]) and campaign.steps(names[1])
    )  # the first may have ended on a busy machine
    lost = campaign.worker(names[1])
    os.kill(lost, signal.SIGKILL)
    campaign.wait_for(lambda: campaign.worker(names[1]) not in (0, lost))
    workers = [Writer.of(RunFolder(campaign.folder / "runs" / name)) for name in names]
    campaign.process.kill()
    printed, _ = campaign.process.communicate()
    assert (
        f"{names[1]}: its process died of SIGKILL. Restarting it from its last checkpoint"
        in printed
    )
    deadline = time.monotonic() + 10
    while any(worker and worker.liveness() is Liveness.ALIVE for worker in workers):
        assert time.monotonic() < deadline, "workers outlive their campaign"
        time.sleep(0.05)
    assert [entry.name for entry in campaign.manifest.runs] == names
    assert re.search(
        r"^condition +pairs +difference", resume(tmp_path / "c", "--seed", "1"), re.MULTILINE
    )
    assert_same_runs(tmp_path / "c", sequential.folder, names)
    assert {entry.status for entry in campaign.manifest.runs} == {Status.DONE}


@pytest.mark.faults("campaigns and workers killed")
@pytest.mark.slow
def test_a_worker_whose_campaign_is_gone_ends_at_once(tmp_path: Path) -> None:
    run = plan_campaign(config_from_mapping(sections(tmp_path, {"max_steps": 500})), tmp_path).runs[
        0
    ]
    worker = start_worker(run, threads=1)
    try:
        deadline = time.monotonic() + 120
        while not (run.folder / "metrics.jsonl").exists():
            assert worker.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        assert worker._process.stdin is not None
        worker._process.stdin.close()  # as the kernel does for a campaign that was killed
        assert worker._process.wait(5) == -signal.SIGKILL
    finally:
        worker.kill()


FORKS_AND_LEAVES = """
import os, time

if not os.path.exists("child"):
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    open("child", "w").write(str(child))
raise ImportError("on purpose " * 20_000)
"""


@pytest.mark.faults("campaigns and workers killed")
def test_a_child_that_a_plugin_leaves_does_not_hold_up_the_campaign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "leaving.py").write_text(FORKS_AND_LEAVES)
    condition = {"advantage_mode": "leaving.advantage", "transform_mode": "none"}
    run = plan_campaign(
        config_from_mapping(sections(tmp_path / "c", {"conditions": [condition]})), tmp_path / "c"
    ).runs[0]
    worker = start_worker(run, threads=1)
    try:
        deadline = time.monotonic() + 60
        while worker._process.poll() is None and worker.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        began = time.monotonic()
        outcome = worker.poll()
        assert time.monotonic() - began < 1
        assert outcome is not None and outcome.status is Status.FAILED
        assert "on purpose" in outcome.reason
    finally:
        worker.kill()
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


def test_a_worker_that_ctrl_c_meets_while_it_starts_is_interrupted(tmp_path: Path) -> None:
    folder = tmp_path / "campaign"
    run = plan_campaign(config_from_mapping(sections(folder)), folder).runs[0]
    with Interrupts():  # as the campaign: no worker begins with Ctrl-C ignored
        worker = start_worker(run, threads=1)
    worker.stop(signal.SIGINT)
    deadline = time.monotonic() + 60
    while (outcome := worker.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert outcome == RunOutcome(Status.INTERRUPTED, "Interrupted by SIGINT.")
    assert (run.folder / "output.log").read_text() == ""
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


TWICE = (signal.SIGTERM, signal.SIGTERM)
STOPS = ((signal.SIGKILL,), (signal.SIGTERM,), (signal.SIGINT,), TWICE)
OF_CAMPAIGN = "CAMPAIGN_OF_THIS_TEST"
"""A variable that every process of a campaign inherits, with the campaign's folder."""
STUCK = """
import os, signal, time

def advantage(rewards):
    if len(rewards) > 3:  # those of the trial before the campaign are smaller
        child = os.fork()
        if child == 0:
            for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            time.sleep(120)
            os._exit(0)
        open(f"child-{child}", "w").close()
        while True:
            time.sleep(60)
    return [0.0] * len(rewards)
"""


def processes_of(folder: Path) -> set[int]:
    found, mark = set(), f"{OF_CAMPAIGN}={folder}".encode()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is another user's
            if mark in environ.read_bytes().split(b"\0"):
                found.add(int(environ.parent.name))
    return found


def seconds_until_gone(campaign: Started, signals: Sequence[int], children: set[int]) -> float:
    """Send the signals to the campaign alone, and wait until nothing is left of it but the
    `children` of user code.
    """
    began = time.monotonic()
    for number in signals:
        campaign.process.send_signal(number)
        time.sleep(0.2 * (len(signals) > 1))
    while campaign.process.poll() is None or processes_of(campaign.folder) - children:
        assert time.monotonic() < began + 60, campaign.process.poll()
        time.sleep(0.01)
    seconds = time.monotonic() - began
    time.sleep(0.3)  # a process that was just being started would have the variable by now
    assert processes_of(campaign.folder) == children
    return seconds


@pytest.mark.faults("campaigns killed and stopped: processes that outlive them")
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
def test_no_process_outlives_a_campaign_that_is_killed_or_stopped(
    tmp_path: Path, long: bool, record_property: Any
) -> None:
    """While its workers are loading, and between steps."""
    took: dict[str, list[float]] = {}
    for number in range(36 if long else len(STOPS)):
        signals, moment = STOPS[number % len(STOPS)], random.Random(number)
        campaign = start(tmp_path / str(number), "--seed", "1", "--max-steps", "500", parallel=True)
        loading = number % 3 != 1
        if loading:
            campaign.wait_for((campaign.folder / "manifest.json").exists)
        else:
            campaign.wait_for(lambda own=campaign: own.steps(NAMES[0]))
        time.sleep(moment.uniform(0, 3 if loading else 0.3))
        name = " and ".join(sent.name for sent in signals)
        took.setdefault(name, []).append(seconds_until_gone(campaign, signals, set()))
        last = signals[-1]
        assert campaign.process.returncode == (-last if last == signal.SIGKILL else 128 + last)
    assert max(took["SIGTERM and SIGTERM"]) < 9, "a second signal waits for no model that loads"
    record_property("cases", sum(map(len, took.values())))
    for name, seconds in took.items():
        record_property(
            f"seconds after {name}, median and most:",
            f"{statistics.median(seconds):.2f} and {max(seconds):.2f}",
        )


@pytest.mark.faults("campaigns killed and stopped: processes that outlive them")
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
def test_a_worker_that_hangs_ends_with_its_campaign_and_a_child_of_user_code_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    """At the second signal. The worker is in a plugin that never returns, and has left a child."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stuck.py").write_text(STUCK)
    conditions = [{"advantage_mode": "stuck.advantage", "transform_mode": "none"}]
    campaign = start(tmp_path / "c", "--seed", "1", parallel=True, conditions=conditions)
    campaign.wait_for(lambda: [*tmp_path.glob("child-*")])
    children = {int(path.name.removeprefix("child-")) for path in tmp_path.glob("child-*")}
    try:
        seconds = seconds_until_gone(campaign, TWICE, children)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
    record_property("seconds after two SIGTERM where a worker hangs:", f"{seconds:.2f}")


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [False, True], ids=["sequential", "parallel"])
def test_ctrl_c_saves_and_ends_with_130(
    parallel: bool, sequential: Finished, tmp_path: Path
) -> None:
    campaign = start(tmp_path / "c", "--seed", "1", "--max-steps", "20", parallel=parallel)
    name = NAMES[0]
    campaign.wait_for(lambda: campaign.steps(name) >= 2)
    campaign.process.send_signal(signal.SIGINT)
    printed, _ = campaign.process.communicate()
    assert campaign.process.returncode == 130, printed
    assert f"continue with `retrain {campaign.folder.parent}" in printed
    assert f"--resume {campaign.folder}`" in printed
    assert campaign.manifest[name].status is Status.INTERRUPTED
    saved = max((campaign.folder / "runs" / name / "checkpoints").glob("step_*"))
    assert int(saved.name.removeprefix("step_")) == campaign.steps(name)


@pytest.mark.slow
def test_a_second_signal_leaves_no_run_running_in_the_manifest(tmp_path: Path) -> None:
    campaign = start(tmp_path / "c", "--seed", "1", "--max-steps", "200")
    name = NAMES[0]
    campaign.wait_for(lambda: campaign.steps(name) >= 2)
    campaign.process.send_signal(signal.SIGTERM)
    campaign.process.send_signal(signal.SIGINT)
    printed, _ = campaign.process.communicate()
    assert campaign.process.returncode in (130, 143), printed
    assert campaign.manifest[name].status is Status.INTERRUPTED


def test_overwrite_is_not_for_campaigns(tmp_path: Path) -> None:
    from retrain.cli.main import main

    file = write_toml(tmp_path / "c.toml", sections(tmp_path / "c"))
    assert main([str(file), "--overwrite"]) == 2
    assert load_config(file).kind == "campaign"

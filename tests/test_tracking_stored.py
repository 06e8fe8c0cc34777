"""What the trackers keep on disk, read back by their own libraries."""

import importlib.util
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from runs import quiet_run, small

from retrain.cli.main import main
from retrain.config import TrainConfig
from retrain.records.entries import EvaluationRecord, GenerationRecord, StepRecord
from retrain.records.evaluation import Evaluation
from retrain.records.jsonl import read_jsonl
from retrain.records.run_folder import RunFolder
from retrain.squeeze import Analysis, TableRow, analyze_adapter
from retrain.tracking import build_tracker
from retrain.tracking.base import Generations, StartEvent, Verbosity
from retrain.tracking.build import track_squeeze
from retrain.tracking.external import metrics
from tests.runs import small_run
from tests.trackers import (
    SECRET,
    config,
    keep_here,
    wandb_history,
    wandb_logs,
    wandb_read,
    wandb_steps,
)


@pytest.fixture(autouse=True)
def everything_stays_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_here(tmp_path / "home", monkeypatch)


def completion(step: int, text: str) -> GenerationRecord:
    return GenerationRecord(step, "p", 0, "1+1=", text, 1.0, "right", 0.5, "stop", 3)


def session(
    folder: Path,
    settings: TrainConfig,
    steps: Sequence[int],
    resumed: dict[str, str] | None = None,
    verbosity: Verbosity = Verbosity.SILENT,
) -> dict[str, str]:
    """One process's share of a run; returns what its checkpoint keeps."""
    about: Any = {"condition": "grpo+none", "verbosity": verbosity, "resumed": resumed}
    first = steps[0] if resumed else 0
    tracker = build_tracker(settings, RunFolder(folder), first_step=first, **about)
    tracker.emit(StartEvent("cpu"))
    state = tracker.state()
    for step in steps:
        tracker.emit(Generations(step, [completion(step, f"answer {step} {SECRET}")]))
        tracker.emit(StepRecord(step=step, condition="grpo+none", loss=step / 2))
    tracker.close()
    return tracker.state() | state


# -- wandb -----------------------------------------------------------------------------------------


def wandb_rows(log: Path, key: str) -> list[list[Any]]:
    """The rows of all increments of a table."""
    named = [item[f"{key}.path"] for item in wandb_history(log) if f"{key}.path" in item]
    tables = [json.loads((log.parent / "files" / name).read_text()) for name in named]
    return [row for table in tables for row in table["data"]]


@pytest.mark.slow
def test_a_run_in_wandb_holds_its_names_its_numbers_and_every_completion(tmp_path: Path) -> None:
    logging = {"wandb_project": "sums", "wandb_group": "mine", "generations_per_step": 2}
    logging["wandb_tags"] = f"first, {'x' * 80}"
    more = {"training": {"max_steps": 3}, "evaluation": {"at_start": True, "max_examples": 2}}
    run = quiet_run(tmp_path / "run", logging=logging, **more)
    (log,) = wandb_logs(run.folder)
    seen = json.loads(wandb_read(log, "--summary"))
    ended = {"project": "sums", "name": "maxrl+none", "state": "finished", "exit_code": 0}
    assert ended.items() <= seen.items()
    assert seen["tags"] == ["first", "x" * 64]
    assert seen["summary"]["status"] == "done" and seen["config"]["training"]["max_steps"] == 3
    assert '"run_group":"mine"' in wandb_read(log).replace(" ", "")
    history = list(wandb_history(log))
    steps = [item for item in history if "train/loss" in item]
    assert [item["trainer/step"] for item in steps] == [0, 1, 2]
    for item, record in zip(steps, run.records(), strict=True):
        assert {name: item[name] for name in metrics(record)} == pytest.approx(metrics(record))
    assert {"train/entropy/mean", "train/surprisal/mean"} <= steps[0].keys()
    (evaluation,) = [item for item in history if "eval/pass@1" in item]
    assert evaluation["trainer/step"] == 0
    stored = [
        [line[name] for name in ("step", "prompt_id", "completion")]
        for line in read_jsonl(RunFolder(run.folder).generations)
    ]
    assert [[row[0], row[1], row[4]] for row in wandb_rows(log, "completions")] == stored
    assert len(stored) == 6


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_the_same_wandb_run_and_replaces_no_table(tmp_path: Path) -> None:
    settings = config(wandb_project="p")
    state = session(tmp_path, settings, [0, 1, 2])
    assert session(tmp_path, settings, [2, 3], state) == state  # step 2 is made again
    first, second = wandb_logs(tmp_path)
    run_id = state["wandb_run_id"]
    assert first.name == second.name == f"run-{run_id}.wandb"
    assert wandb_steps(second) == [2, 3]
    records = map(json.loads, wandb_read(second).splitlines())
    axes = [record["metric"] for record in records if record["type"] == "metric"]
    axis = {"glob_name": "train/*", "step_metric": "trainer/step"}
    assert any(axis.items() <= found.items() for found in axes)
    assert [row[0] for row in wandb_rows(first, "completions")] == [0, 1, 2]
    assert [row[0] for row in wandb_rows(second, "completions_from_step_2")] == [2, 3]
    assert session(tmp_path / "copy", settings, [2], state)["wandb_run_id"] != run_id


@pytest.mark.slow
def test_the_checkpoint_keeps_the_wandb_run_and_resume_uses_it(tmp_path: Path) -> None:
    folder, logging = tmp_path / "run", {"wandb_project": "p"}
    quiet_run(folder, training={"max_steps": 2}, logging=logging)
    more = {"training": {"max_steps": 3}, "resume": {"from": str(folder)}}
    quiet_run(folder, logging=logging, **more)
    first, second = wandb_logs(folder)
    state = json.loads((folder / "trainer_state.json").read_text())
    assert first.name == second.name == f"run-{state['tracking']['wandb_run_id']}.wandb"
    assert wandb_steps(second) == [2]


def test_a_table_grows_by_no_more_increments_than_wandb_shows(tmp_path: Path) -> None:
    settings = TrainConfig.model_validate(
        {"logging": {"wandb_project": "p"}, "training": {"max_steps": 250}}
    )
    session(tmp_path, settings, range(8))
    (log,) = wandb_logs(tmp_path)
    assert (
        sum("completions.path" in item for item in wandb_history(log)) == 3
    )  # of 3, 3 and the last 2 steps
    assert [row[0] for row in wandb_rows(log, "completions")] == list(range(8))


@pytest.mark.slow
def test_tables_need_no_home_and_a_table_that_fails_costs_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stores = ("WANDB_DATA_DIR", "WANDB_CACHE_DIR")
    for name in stores:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", "/dev/null")
    settings = TrainConfig.model_validate(
        {"logging": {"wandb_project": "p"}, "training": {"max_steps": 2}}
    )
    session(tmp_path / "run", settings, [0, 1])
    (log,) = wandb_logs(tmp_path / "run")
    assert [row[0] for row in wandb_rows(log, "completions")] == [0, 1]
    assert list((tmp_path / "run" / "wandb" / "artifacts").iterdir()), "tables stay with their run"
    assert not os.environ.keys() & set(stores), "the next run of this process has its own"

    for name in stores:
        monkeypatch.setenv(name, "/dev/null/none")
    session(tmp_path / "none", settings, [0, 1], verbosity=Verbosity.NORMAL)
    (log,) = wandb_logs(tmp_path / "none")
    assert [item["train/loss"] for item in wandb_history(log) if "train/loss" in item] == [0, 0.5]
    assert capsys.readouterr().out.count("wandb did not take the table completions") == 1


# -- tensorboard -----------------------------------------------------------------------------------

needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="needs the extra tensorboard"
)
needs_trackio = pytest.mark.skipif(
    importlib.util.find_spec("trackio") is None, reason="needs the extra trackio"
)


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def points(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in events(folder).Scalars(tag)]


@needs_tensorboard
def test_tensorboard_shows_the_metrics_the_evaluations_and_the_completions(tmp_path: Path) -> None:
    more = {"training": {"max_steps": 2}, "evaluation": {"every": 2, "max_examples": 2}}
    run = quiet_run(tmp_path / "run", logging={"trackers": ["tensorboard"]}, **more)
    folder = RunFolder(run.folder).tensorboard
    for tag in metrics(run.records()[0]):
        assert points(folder, tag) == [
            (record.step, pytest.approx(metrics(record)[tag])) for record in run.records()
        ]
    after = run.summary.after
    assert after is not None
    assert points(folder / "eval", "eval/pass@1") == [(2, pytest.approx(after.pass_at[1]))]
    first, *_ = events(folder).Tensors("completions/text_summary")
    text = first.tensor_proto.string_val[0].decode()
    assert all(
        next(iter(line["completion"].splitlines()), "") in text
        for line in read_jsonl(RunFolder(run.folder).generations)
        if line["step"] == 0
    )


@needs_tensorboard
def test_tensorboard_shows_a_repeated_step_once_and_keeps_its_evaluation(tmp_path: Path) -> None:
    for steps, resumed in (([0, 1, 2, 3], {}), ([2, 3, 4], {"first": "session"})):
        first = steps[0]
        about: Any = {"condition": "grpo+none", "verbosity": Verbosity.SILENT}
        about |= {"resumed": resumed, "first_step": first}
        tracker = build_tracker(config("tensorboard"), RunFolder(tmp_path), **about)
        tracker.emit(StartEvent("cpu"))
        for step in steps:
            if step > first or first == 0:  # a checkpoint's evaluation is not made again
                tracker.emit(Evaluation(step, [EvaluationRecord(step, "a", "sums", 1, 1, 0, 1.0)]))
            tracker.emit(StepRecord(step=step, condition="grpo+none", loss=step / 2))
        tracker.close()
        time.sleep(
            1.1
        )  # the library reads the files of a folder in the order of the seconds in their names
    folder = tmp_path / "tensorboard"
    assert points(folder, "train/loss") == [(step, step / 2) for step in range(5)]
    assert [step for step, _ in points(folder / "eval", "eval/pass@1")] == [*range(5)]


# -- trackio ---------------------------------------------------------------------------------------


def trackio_read(project: str) -> dict[str, list[dict[str, Any]]]:
    """Run id -> what was logged."""
    from trackio import Api
    from trackio.sqlite_storage import SQLiteStorage

    runs = Api().runs(project)
    return {run.id: SQLiteStorage.get_logs(project, run.name, run_id=run.id) for run in runs}


@needs_trackio
def test_trackio_holds_the_numbers_and_the_completions_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"wandb_project": "sums", "wandb_run_name": "first"}
    sections: dict[str, Any] = {
        "logging": {"trackers": ["trackio"], "generations_per_step": 2, **names},
        "training": {"max_steps": 2},
        "evaluation": {"at_end": True, "max_examples": 2},
    }
    run = small_run(small(tmp_path / "run", **sections))
    (logged,) = trackio_read("sums").values()
    steps = [item for item in logged if "train/loss" in item]
    assert [item["step"] for item in steps] == [0, 1]
    for item, record in zip(steps, run.records(), strict=True):
        assert {name: item[name] for name in metrics(record)} == pytest.approx(metrics(record))
    assert [item["step"] for item in logged if "eval/pass@1" in item] == [2]
    tables = [item["completions"]["_value"] for item in logged if "completions" in item]
    stored = [line["completion"] for line in read_jsonl(RunFolder(run.folder).generations)]
    assert [row["completion"] for table in tables for row in table] == stored and len(stored) == 4
    assert "* " not in capsys.readouterr().out  # how each of its lines begins


@pytest.mark.slow
@needs_trackio
def test_a_resumed_run_goes_on_in_its_own_trackio_run_not_in_a_newer_namesake(
    tmp_path: Path,
) -> None:
    settings = config("trackio", wandb_project="p")
    state = session(tmp_path, settings, [0, 1])
    session(tmp_path, settings, [0, 1, 2])
    assert session(tmp_path, settings, [2], state) == state
    logged = trackio_read("p")[state["trackio_run_id"]]
    assert [item["step"] for item in logged if "train/loss" in item] == [0, 1, 2]


# -- all of them -----------------------------------------------------------------------------------


@pytest.mark.slow
@needs_tensorboard
@needs_trackio
def test_a_squeeze_analysis_is_a_run_of_its_own_with_its_curve_over_the_rank(
    tmp_path: Path,
) -> None:
    table = [[1, 0.5, 0.25, 0.75, 0.5, 0.7], [2, 0.96, 0.9, 1.0, 0.97, 0.2]]
    rows = tuple(TableRow(*row) for row in table)
    analysis = Analysis(Path("adapter"), 4, 2, "mean", 0.95, rows, ())
    settings = config("wandb", "trackio", "tensorboard", wandb_project="ranks", wandb_tags="mine")
    said: list[str] = []
    track_squeeze(settings, RunFolder(tmp_path), analysis.summary(), said.append)
    assert said == []
    (log,) = wandb_logs(tmp_path)
    seen = json.loads(wandb_read(log, "--summary"))
    assert (seen["name"], seen["tags"], seen["exit_code"]) == ("squeeze-analysis", ["mine"], 0)
    assert seen["summary"]["squeeze/recommended_rank"] == 2
    assert seen["summary"]["squeeze/threshold"] == 0.95
    curve = [
        (item["squeeze/rank"], item["squeeze/variance_mean"])
        for item in wandb_history(log)
        if "squeeze/variance_mean" in item
    ]
    assert curve == [(1, 0.5), (2, 0.96)]
    assert wandb_rows(log, "squeeze/table") == table
    found = points(tmp_path / "tensorboard", "squeeze/variance_min")
    assert found == [(1, 0.25), (2, pytest.approx(0.9))]
    (logged,) = trackio_read("ranks").values()
    errors = {item["step"]: item["squeeze/error"] for item in logged if "squeeze/error" in item}
    assert errors == {1: 0.7, 2: 0.2}


@needs_tensorboard
def test_a_squeeze_job_sends_its_analysis_beside_the_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = quiet_run(tmp_path / "logs" / "run", training={"max_steps": 1})
    file = tmp_path / "squeeze.toml"
    file.write_text(
        f'[squeeze]\nadapter_path = "{run.adapter}"\n[logging]\ntrackers = ["tensorboard"]\nlog_dir'
        f' = "{tmp_path}/logs/train"\n'
    )
    assert main([str(file)]) == 0
    assert "unused" not in capsys.readouterr().out
    analysis = analyze_adapter(run.adapter)
    curve = points(tmp_path / "logs" / "squeeze-analysis" / "tensorboard", "squeeze/variance_whole")
    assert curve == [(row.rank, pytest.approx(row.energy)) for row in analysis.table]


@needs_tensorboard
@needs_trackio
def test_no_tracker_holds_a_secret(tmp_path: Path) -> None:
    hook = sys.excepthook
    names = {"wandb_project": f"p-{SECRET}", "wandb_group": SECRET, "wandb_run_name": SECRET}
    session(tmp_path, config("wandb", "trackio", "tensorboard", **names), [0])
    assert sys.excepthook is hook  # which masks tracebacks
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 5
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]

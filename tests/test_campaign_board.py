"""What a running campaign prints, on a terminal and elsewhere."""

import errno
import io
import os
from datetime import datetime
from pathlib import Path

import pytest
from rich.console import Console

from retrain.campaign.board import Board, read_progress
from retrain.campaign.manifest import Manifest, Status
from retrain.campaign.plan import CampaignPlan, plan_campaign
from retrain.config import config_from_mapping
from retrain.errors import ConfigurationError, EnvironmentFailure, RunFailed
from retrain.records.disk import writing_to
from retrain.records.entries import StepRecord
from retrain.records.jsonl import JsonlWriter
from retrain.records.run_folder import RunFolder


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Left(io.StringIO):
    """An output whose reader goes away once there is an error."""

    error: OSError | None = None

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        if self.error:
            raise self.error
        return super().write(text)


def write_steps(folder: Path, count: int) -> None:
    with JsonlWriter(RunFolder(folder).metrics) as writer:
        for step in range(count):
            writer.write(
                StepRecord(
                    step, "c", correct_rate=1.0, running_correct_rate=0.453, step_time_s=2.0
                ).to_json()
            )


@pytest.fixture
def campaign(tmp_path: Path) -> tuple[CampaignPlan, Manifest]:
    """One run done, one running, one failed, the others pending."""
    plan = plan_campaign(
        config_from_mapping({"campaign": {"seeds": [1, 2], "max_steps": 50}}), tmp_path
    )
    manifest = Manifest.of_plan(plan, datetime.now())
    done, running, failed = plan.runs[:3]
    for run, steps in ((done, 50), (running, 12), (failed, 0)):
        run.folder.mkdir(parents=True)
        write_steps(run.folder, steps)
        manifest.started(run.name)
    manifest.ended(done.name, Status.DONE)
    manifest.ended(failed.name, Status.FAILED, "[lora] init_from is \x1b[31mnowhere")
    return plan, manifest


def render(board: Board, width: int = 200) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(board.table(width))
    return out.getvalue()


def test_the_table_tells_each_run_and_the_campaign(campaign: tuple[CampaignPlan, Manifest]) -> None:
    text = render(Board(*campaign, workers=1))
    rows = {line.split()[0]: line for line in text.splitlines() if "_s" in line.split()[0]}
    reason = rows.pop("maxrl+gtpo_s1:")
    assert "running" in rows["maxrl+none_s1"] and "12/50" in rows["maxrl+none_s1"]
    assert "45.3%" in rows["maxrl+none_s1"] and "1 min 16 s" in rows["maxrl+none_s1"]
    assert "done" in rows["grpo+none_s1"] and "50/50" in rows["grpo+none_s1"]
    assert (
        "failed" in rows["maxrl+gtpo_s1"]
        and reason.rstrip() == "maxrl+gtpo_s1: [lora] init_from is nowhere"
    ), "harmless text"
    assert (
        "1 running, 1 failed, 1 done, 7 pending | step 62 of 500 | 12 min 56 s left"
        in text.replace("\n", "")
    )


@pytest.mark.parametrize("width", [80, 200])
def test_long_labels_and_reasons_leave_room_for_every_number_and_seed(
    width: int, tmp_path: Path
) -> None:
    label = "importance-weighted-with-a-clip-that-is-wide_and_slow"
    condition = {"advantage_mode": "grpo", "transform_mode": "none", "label": label}
    plan = plan_campaign(
        config_from_mapping(
            {"campaign": {"seeds": [101, 202], "max_steps": 500, "conditions": [condition]}}
        ),
        tmp_path,
    )
    manifest = Manifest.of_plan(plan, datetime.now())
    for run in plan.runs:
        run.folder.mkdir(parents=True)
        write_steps(run.folder, 123)
        manifest.started(run.name)
    manifest.ended(
        plan.runs[0].name,
        Status.FAILED,
        "16 of 16 completions of the last step could not be judged, " + "and so on " * 40,
    )
    lines = [line.rstrip() for line in render(Board(plan, manifest, workers=1), width).splitlines()]
    assert max(map(len, lines)) <= width
    running, failed, *_ = lines[
        next(number for number, line in enumerate(lines) if line.startswith("run ")) + 1 :
    ]
    assert "_s101" in failed and "_s202" in running
    for row in (failed, running):
        assert "123/500" in row and "45.3%" in row
    assert running.endswith("12 min 34 s")
    assert (label in running) == (width == 200)
    assert lines[-1].startswith(f"{label}_s101: 16 of 16") and lines[-1].endswith("…")


def test_a_large_campaign_fits_the_terminal_and_shows_what_runs(tmp_path: Path) -> None:
    plan = plan_campaign(config_from_mapping({"campaign": {}}), tmp_path)
    manifest = Manifest.of_plan(plan, datetime.now())
    manifest.started(plan.runs[-1].name)
    out = Terminal()
    with Board(plan, manifest, workers=1, out=out) as board:
        text = render(board)
    assert len(text.splitlines()) <= 25
    assert plan.runs[-1].name in text and "more" in text


def test_a_terminal_gets_a_table_that_is_drawn_again(
    campaign: tuple[CampaignPlan, Manifest],
) -> None:
    out = Terminal()
    with Board(*campaign, workers=1, out=out) as board:
        board.say("a line above it " + "that is longer than a terminal is wide " * 9)
    board.say("a line below it")
    assert "that is longer than a terminal is wide " * 9 in out.getvalue(), "a line is not broken"
    assert "maxrl+none_s1" in out.getvalue()
    assert out.getvalue().endswith("a line below it\n")


@pytest.mark.parametrize(
    ("terminal", "number"), [(True, errno.EIO), (False, errno.EIO), (False, errno.EPIPE)]
)
def test_a_campaign_outlives_the_reader_of_what_it_prints(
    campaign: tuple[CampaignPlan, Manifest],
    monkeypatch: pytest.MonkeyPatch,
    terminal: bool,
    number: int,
) -> None:
    monkeypatch.setattr("retrain.campaign.board.REFRESH_S", 0.01)
    out = Left(terminal)
    with Board(*campaign, workers=1, out=out) as board:
        out.error = OSError(number, os.strerror(number))
        board.say("Stopping: running runs save a checkpoint first.")
        board.ended("grpo+none_s1")
        board._closing.wait(0.1)
        assert board._thread and board._thread.is_alive()
    board.say("a line below it")
    assert "Stopping" not in out.getvalue()


def test_a_full_disk_under_what_a_campaign_prints_is_named(
    campaign: tuple[CampaignPlan, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("REFRESH_S", "LINES_EVERY_S"):
        monkeypatch.setattr(f"retrain.campaign.board.{name}", 0.01)
    plan, manifest = campaign
    entry = manifest.runs[0]
    entry.status = Status.RUNNING
    write_steps(plan.folder / entry.dir, 1)
    out = Left(terminal=False)
    out.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        pytest.raises(EnvironmentFailure, match=r"^Standard output cannot be written: No space"),
        writing_to(plan.folder, "continue"),
        Board(plan, manifest, workers=1, out=out) as board,
    ):
        board._closing.wait(0.1)
        assert board._said and board._thread and board._thread.is_alive()
        board.say("a line")


def test_a_folder_that_was_deleted_while_it_was_written_to_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(RunFailed, match=r"gone was deleted or moved while it was written to"),
        writing_to(tmp_path / "gone", "continue"),
    ):
        (tmp_path / "gone" / "manifest.json").write_text("{}")


def test_elsewhere_a_run_is_a_line_at_its_start_and_at_its_end(
    campaign: tuple[CampaignPlan, Manifest],
) -> None:
    plan, manifest = campaign
    out = io.StringIO()
    with Board(plan, manifest, workers=1, out=out) as board:
        board.started("maxrl+none_s1")
        board.ended("grpo+none_s1")
        board.ended("maxrl+gtpo_s1")
    started, done, failed = out.getvalue().splitlines()
    assert started == "[ 2/10] maxrl+none_s1 started"
    assert done == "[ 1/10] grpo+none_s1 done: step 50/50, correct so far 45.3%"
    assert failed.startswith(
        "[ 3/10] maxrl+gtpo_s1 failed: step 0/50 | [lora] init_from is nowhere | "
    )
    assert failed.endswith("runs/maxrl+gtpo_s1/output.log")


def test_elsewhere_running_runs_print_a_line_now_and_then(
    campaign: tuple[CampaignPlan, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrain.campaign.board.REFRESH_S", 0.01)
    monkeypatch.setattr("retrain.campaign.board.LINES_EVERY_S", 0.01)
    out = io.StringIO()
    with Board(*campaign, workers=1, out=out) as board:
        for _ in range(500):
            if out.getvalue():
                break
            board._closing.wait(0.01)
        board._closing.wait(0.1)
    # One line, however often it is looked: nothing changed.
    assert out.getvalue() == (
        "[ 2/10] maxrl+none_s1 step 12/50, correct so far 45.3%, 1 min 16 s left\n"
    )


def test_quiet_leaves_what_is_said_and_what_ended(
    campaign: tuple[CampaignPlan, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrain.campaign.board.REFRESH_S", 0.01)
    monkeypatch.setattr("retrain.campaign.board.LINES_EVERY_S", 0.01)
    out = Terminal()
    with Board(*campaign, workers=1, out=out, quiet=True) as board:
        board.say("x")
        board.started("maxrl+none_s1")
        board.ended("grpo+none_s1")
        board._closing.wait(0.1)
    first, *rest = out.getvalue().splitlines()
    assert first == "x" and len(rest) == 1 and rest[0].startswith("[ 1/10] grpo+none_s1 done: ")


def test_a_run_without_steps_has_no_rate(campaign: tuple[CampaignPlan, Manifest]) -> None:
    plan, manifest = campaign
    progress = read_progress(plan, manifest["maxrl+gtpo_s1"])
    assert (progress.steps, progress.correct, progress.remaining_s) == (0, None, None)


def test_a_campaign_whose_words_are_a_secrets_value_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_TOKEN", "random")
    config = {
        "reward": {"type": "random", "params": {}},
        "campaign": {"seeds": [1, 2], "max_steps": 50},
    }
    plan = plan_campaign(config_from_mapping(config), tmp_path)
    Manifest.of_plan(plan, datetime.now()).write()
    Manifest.read(tmp_path).resumed_with(plan)


def test_a_key_of_a_stored_campaign_that_this_version_does_not_know_is_the_manifests(
    tmp_path: Path,
) -> None:
    config = {"campaign": {"seeds": [1], "max_steps": 1}}
    plan = plan_campaign(config_from_mapping(config), tmp_path)
    manifest = Manifest.of_plan(plan, datetime.now())
    manifest.config["nope"] = {"a": 1}
    with pytest.raises(ConfigurationError, match=r"manifest\.json, configuration: \[nope\]"):
        manifest.resumed_with(plan)

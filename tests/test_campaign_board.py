"""What a running campaign prints."""

import errno
import io
import os
from contextlib import closing
from datetime import datetime
from pathlib import Path

import pytest

from retrain.campaign.board import Board
from retrain.campaign.manifest import Manifest, Status
from retrain.campaign.plan import CampaignPlan, plan_campaign
from retrain.config import config_from_mapping
from retrain.errors import ConfigurationError, EnvironmentFailure, RunFailed
from retrain.records.disk import writing_to
from retrain.records.entries import StepRecord
from retrain.records.jsonl import JsonlWriter
from retrain.records.run_folder import RunFolder


class Left(io.StringIO):
    """An output whose reader goes away once there is an error."""

    error: OSError | None = None

    def write(self, text: str) -> int:
        if self.error:
            raise self.error
        return super().write(text)


def write_steps(folder: Path, count: int) -> None:
    with closing(JsonlWriter(RunFolder(folder).metrics)) as writer:
        for step in range(count):
            record = StepRecord(
                step, "c", correct_rate=1.0, running_correct_rate=0.453, step_time_s=2.0
            )
            writer.write(record.to_json())


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


@pytest.mark.parametrize("number", [errno.EIO, errno.EPIPE])
def test_a_campaign_outlives_the_reader_of_what_it_prints(
    campaign: tuple[CampaignPlan, Manifest], number: int
) -> None:
    out = Left()
    board = Board(*campaign, out=out)
    out.error = OSError(number, os.strerror(number))
    board.say("Stopping: running runs save a checkpoint first.")
    board.ended("grpo+none_s1")
    assert "Stopping" not in out.getvalue()


def test_a_full_disk_under_what_a_campaign_prints_is_named(
    campaign: tuple[CampaignPlan, Manifest],
) -> None:
    out = Left()
    out.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        pytest.raises(EnvironmentFailure, match=r"^Standard output cannot be written: No space"),
        writing_to(campaign[0].folder, "continue"),
    ):
        Board(*campaign, out=out).say("a line")


def test_a_folder_that_was_deleted_while_it_was_written_to_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(RunFailed, match=r"gone was deleted or moved while it was written to"),
        writing_to(tmp_path / "gone", "continue"),
    ):
        (tmp_path / "gone" / "manifest.json").write_text("{}")


def test_a_run_is_a_line_at_its_start_and_at_its_end(
    campaign: tuple[CampaignPlan, Manifest],
) -> None:
    plan, manifest = campaign
    out = io.StringIO()
    board = Board(plan, manifest, out=out)
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


def test_quiet_leaves_what_is_said_and_what_ended(campaign: tuple[CampaignPlan, Manifest]) -> None:
    out = io.StringIO()
    board = Board(*campaign, out=out, quiet=True)
    board.say("x")
    board.started("maxrl+none_s1")
    board.ended("grpo+none_s1")
    first, *rest = out.getvalue().splitlines()
    assert first == "x" and len(rest) == 1 and rest[0].startswith("[ 1/10] grpo+none_s1 done: ")


def test_a_run_with_a_damaged_record_still_has_its_line(
    campaign: tuple[CampaignPlan, Manifest],
) -> None:
    plan, manifest = campaign
    RunFolder(plan.runs[0].folder).metrics.write_text("[]\n")
    out = io.StringIO()
    Board(plan, manifest, out=out).ended(plan.runs[0].name)
    assert out.getvalue() == "[ 1/10] grpo+none_s1 done: step 0/50\n"


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

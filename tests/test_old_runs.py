"""Folders written by an earlier retrain go on, are evaluated, compared and reported as they always
were.

tests/data/written_by_0.1.0 was written at commit 68cde85: a run killed between its second and third
checkpoint, and a campaign killed in the last of its four runs. Neither is ever written again: what
reads them has to go on reading them.
"""

import json
import shutil
from pathlib import Path

import pytest

from retrain import load_config, load_runs, train
from retrain.analysis import verdict
from retrain.analysis.compare import compare_campaign
from retrain.analysis.status import overview
from retrain.campaign import Status, run_campaign
from retrain.config import replaced
from retrain.config.overrides import Overrides
from retrain.report.data import ReportRequest
from retrain.report.page import build_page
from retrain.run.evaluate import evaluate_run
from tests.runs import lines

OLD = Path(__file__).parent / "data" / "written_by_0.1.0"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLD / "run", tmp_path / "run"))


def test_an_old_run_goes_on_where_it_was_killed(run: Path) -> None:
    before = lines(run / "emergence" / "generations.jsonl")
    config = replaced(load_config(OLD / "run.toml"), {"resume.from": str(run)})
    assert train(config, quiet=True).summary.steps == 3
    assert [line["step"] for line in lines(run / "metrics.jsonl")] == [0, 1, 2]
    assert [line["completion"] for line in lines(run / "emergence" / "generations.jsonl")] == [
        line["completion"] for line in before
    ]
    assert [line["step"] for line in lines(run / "evaluation.jsonl")] == [0] * 4 + [3] * 4
    assert json.loads((run / "summary.json").read_text())["evaluation"]["before"]["problems"] == 4


def test_an_old_run_is_evaluated_listed_and_reported(run: Path) -> None:
    assert evaluate_run(run, overrides=Overrides(), say=lambda line: None).step == 2
    assert len(load_runs(run)) == 3
    assert overview(run).runs[0].steps == 3
    assert "<html" in build_page(ReportRequest(run))


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The old campaign, resumed."""
    folder = Path(shutil.copytree(OLD / "campaign", tmp_path_factory.mktemp("old") / "campaign"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("retrain.campaign.board.Board.say", lambda board, line: None)
        manifest = run_campaign(
            replaced(load_config(OLD / "campaign.toml"), {"resume.from": str(folder)})
        )
    assert [entry.status for entry in manifest.runs] == [Status.DONE] * 4
    return folder


def test_an_old_campaign_goes_on_with_the_run_that_was_killed(campaign: Path) -> None:
    for name in ("grpo+none_s1", "weighted_s1", "grpo+none_s2"):
        assert (campaign / "runs" / name / "metrics.jsonl").read_bytes() == (
            OLD / "campaign/runs" / name / "metrics.jsonl"
        ).read_bytes()
    killed = campaign / "runs" / "weighted_s2"
    assert [line["step"] for line in lines(killed / "metrics.jsonl")] == [0, 1]
    assert "Resuming" in (killed / "output.log").read_text()


def test_an_old_campaign_is_compared_and_reported(campaign: Path) -> None:
    comparison = compare_campaign(campaign, verdict.TestSettings())
    assert [arm.label for arm in comparison.arms] == ["grpo+none", "weighted"]
    assert "<html" in build_page(ReportRequest(campaign))

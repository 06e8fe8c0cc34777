"""`retrain eval` leaves its answers, and two such folders are compared in pairs of problems."""

import json
from pathlib import Path
from typing import Any

import pytest
from runs import lines, quiet_run, small

from retrain.cli.main import main
from retrain.records.entries import EvaluationRecord
from retrain.records.evaluation import KIND, Evaluation, EvaluationFolder
from retrain.records.run_folder import mark


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sections: dict[str, Any] = {
        "reward": {"type": "match"},
        "evaluation": {"samples": 2, "max_examples": 6},
        "training": {"max_steps": 1, "save_every": 1},
    }
    return quiet_run(tmp_path_factory.mktemp("logs") / "run", **sections).folder


def test_eval_writes_every_answer_and_never_over_another_evaluation(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(run), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    folder = EvaluationFolder(Path(summary["folder"]))
    assert folder.path == run / "evaluations" / "1"
    assert main(["eval", str(run), "--output", str(folder.path)]) == 2
    assert "is not an empty folder" in capsys.readouterr().err
    answers = lines(folder.samples)
    assert len(answers) == 12
    assert {(item["example_id"], item["sample"]) for item in answers} == {
        (problem["example_id"], sample) for problem in lines(folder.problems) for sample in (0, 1)
    }
    right = sum(item["outcome"] == "right" for item in answers)
    assert right == sum(problem["correct"] for problem in lines(folder.problems))
    log = json.loads(folder.inspect_log.read_text())
    assert log["version"] == 2 and len(log["samples"]) == 12
    assert sum(sample["scores"]["reward"]["value"] == "C" for sample in log["samples"]) == right
    assert {sample["epoch"] for sample in log["samples"]} == {1, 2}


def write_evaluation(folder: Path, right: list[int]) -> Path:
    places = [(f"p{i}", f"task-{i % 2}") for i in range(len(right))]
    problems = [
        EvaluationRecord(2, *place, 4, c, 0, c / 4) for place, c in zip(places, right, strict=True)
    ]
    mark(folder, KIND)
    config = small(folder, reward={"type": "match"})
    EvaluationFolder(folder).write(config, Evaluation(2, problems), [])
    return folder


def test_inspects_log_names_the_tasks_that_were_asked(tmp_path: Path) -> None:
    """And not [data] source, which is training's."""
    folder = EvaluationFolder(write_evaluation(tmp_path / "e", [4, 2]))
    log = json.loads(folder.inspect_log.read_text())
    assert log["eval"]["task"] == "retrain/task-0+task-1"
    assert log["eval"]["dataset"]["name"] == "task-0+task-1"


def test_an_evaluation_is_no_run_and_says_what_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = (write_evaluation(tmp_path / name, [1] * 9) for name in ("one", "two"))
    assert main(["diff", str(one), str(two)]) == 2
    assert "one holds no run of retrain (it is an evaluation's)" in capsys.readouterr().err
    assert main(["status", str(tmp_path)]) == 0
    assert "resume it" not in capsys.readouterr().out
    assert main(["compare", str(one), "--baseline", str(two)]) == 2
    said = "one is one evaluation, and comparing two of them left in 0.10"
    assert said in capsys.readouterr().err


def test_every_task_and_every_k_has_an_interval() -> None:
    problems = [EvaluationRecord(0, f"p{i}", f"task-{i % 2}", 4, i % 5, 0, None) for i in range(40)]
    summary = Evaluation(0, problems, ks=[1, 4]).summary()
    assert summary["pass@4_interval"][0] < summary["pass@4"] < summary["pass@4_interval"][1]
    assert {*summary["tasks"]} == {"task-0", "task-1"}
    for part in summary["tasks"].values():
        assert part["problems"] == 20
        assert part["pass@1_interval"][0] < part["pass@1"] < part["pass@1_interval"][1]


def test_before_and_after_are_compared_by_problem() -> None:
    """Hard and easy problems alike gain an eighth: the paired interval is narrow where the two
    intervals overlap.
    """
    right = [i % 2 * 6 for i in range(60)]
    before, after = (
        Evaluation(step, [EvaluationRecord(step, f"p{i}", "t", 8, n, 0, None) for i, n in counts])
        for step, counts in (
            (0, [*enumerate(right)]),
            (9, [(i, n + (i > 0)) for i, n in enumerate(right)]),
        )
    )
    found = after.difference_from(before)
    assert found is not None and found[0] == pytest.approx(0.1229, abs=1e-3) and found[1][0] > 0.1
    assert after.interval[0] < before.interval[1]


def test_problems_that_share_an_id_are_compared_one_by_one() -> None:
    """Three of four problems are right before and after: nothing has changed."""
    right = (1, 1, 1, 0)
    before, after = (
        Evaluation(step, [EvaluationRecord(step, "p", "t", 1, one, 0, None) for one in right])
        for step in (0, 9)
    )
    assert after.difference_from(before) == (0.0, (0.0, 0.0))

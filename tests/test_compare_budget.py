"""compare --at: runs where they had used up an equal number of tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
from campaigns import compared, problems, write_run

from retrain.analysis.budget import Budget, RunAtBudget
from retrain.cli.main import main
from retrain.errors import ConfigurationError

STEPS, ASKED = 4, 100
EVERY = (0, 2, 4)
"""Steps of the evaluations."""


def run_of(
    folder: Path, seed: int, arm: str, step_tokens: int, right: tuple[int, ...], **fields: Any
) -> Path:
    """A run of four steps of so many tokens each, with right answers of 100 at each evaluation."""
    write_run(
        folder, seed, [0.1, 0.2, 0.3, 0.4], algorithm={"advantage_mode": arm}, training=MINIBATCHES
    )
    metrics = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    rate = {"tokens_per_s": step_tokens / 0.37, "step_time_s": 0.37, "num_datums": 8}
    metrics.write_text("".join(json.dumps(line | rate | fields) + "\n" for line in lines))
    answers = [
        json.dumps(record.to_json() | {"step": step})
        for step, count in zip(EVERY, right, strict=True)
        for record in problems([1] * count + [0] * (ASKED - count))
    ]
    (folder / "evaluation.jsonl").write_text("\n".join(answers) + "\n")
    return folder


MINIBATCHES = {"minibatches": 4, "updates_per_batch": 2}


@pytest.fixture
def arms(tmp_path: Path) -> list[str]:
    """Eight seeds of two arms: the candidate is 8 points better after as many steps, and takes
    twice the tokens.
    """
    candidates, baselines = [], []
    for seed in range(1, 9):
        extra = seed % 3
        right = (30, 48 + extra, 58 + extra)
        candidates.append(run_of(tmp_path / f"c{seed}", seed, "maxrl", 200, right))
        baselines.append(run_of(tmp_path / f"b{seed}", seed, "grpo", 100, (30, 40, 50 + extra)))
    return [*map(str, candidates), "--baseline", *map(str, baselines)]


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    """One run of each arm, of 400 tokens."""
    ours, theirs = (run_of(tmp_path / arm, 1, arm, 100, (30, 40, 50)) for arm in ("maxrl", "grpo"))
    return [str(ours), "--baseline", str(theirs)]


def means(comparison: dict[str, Any]) -> list[float]:
    return [round(100 * arm["mean"], 6) for arm in comparison["arms"]]


def test_a_rate_is_on_the_line_between_two_evaluations(
    arms: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """300 tokens: the baseline is between its second evaluation (200) and its third (400), the
    candidate between its first (0) and its second (400).
    """
    extra = sum(seed % 3 for seed in range(1, 9)) / 8
    found = compared(capsys, *arms, "--at", "tokens=300")
    baseline, candidate = (40 + 50 + extra) / 2, 30 / 4 + 3 / 4 * (48 + extra)
    assert means(found) == pytest.approx([baseline, candidate], abs=1e-4)
    assert found["at"] == {"tokens": 300}
    said = " ".join(found["notes"])
    assert "the runs took 1 to 3 whole steps" in said and "ended at different" not in said
    assert "at 300 prompt and completion tokens" in found["metric_description"]
    assert "at" not in compared(capsys, *arms)


def test_unjudged_answers_of_the_farther_evaluation_withhold_a_verdict_too(
    arms: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Three quarters of the way from an evaluation whose wrong answers were not judged."""
    for arm in arms[: arms.index("--baseline")]:
        file = Path(arm, "evaluation.jsonl")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines:
            if line["step"] == 0 and not line["correct"]:
                line.update(samples=0, could_not_judge=1, reward_mean=None)
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = compared(capsys, *arms, "--at", "tokens=300")
    (contrast,) = found["contrasts"]
    assert contrast["verdict"] == "inconclusive" and contrast["unjudged_bounds"]
    assert "560 held-out answers could not be judged" in " ".join(found["notes"])


def test_a_run_without_metrics_is_short_of_every_budget(
    arms: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path(arms[0], "metrics.jsonl").unlink()
    Path(arms[0], "summary.json").write_text('{"status": "done", "steps": 0}')
    assert main(["compare", *arms, "--at", "tokens=300"]) == 2
    assert "has 0 tokens, short of --at tokens=300" in capsys.readouterr().err


def test_an_evaluation_after_the_last_record_is_named(
    arms: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path(arms[0], "summary.json").write_text('{"status": "done", "steps": 3}')
    metrics = Path(arms[0], "metrics.jsonl")
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:3]))
    assert main(["compare", *arms, "--at", "tokens=300"]) == 1
    assert f"after 4 steps, and {metrics} has 3 of them" in capsys.readouterr().err


def test_an_evaluation_at_the_budget_is_taken_as_it_is(
    arms: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """400 tokens are four steps of the baseline, and two of the candidate."""
    extra = sum(seed % 3 for seed in range(1, 9)) / 8
    found = compared(capsys, *arms, "--at", "tokens=400")
    assert means(found) == pytest.approx([50 + extra, 48 + extra])


def test_a_training_metric_ends_at_the_last_step_within_the_budget(
    arms: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = compared(capsys, *arms, "--at", "tokens=400", "--metric", "correct_rate")
    assert means(found) == pytest.approx([25, 15])  # four steps of 100 tokens, two of 200
    found = compared(capsys, *arms, "--at", "tokens=250", "--metric", "auc")
    assert means(found) == pytest.approx([15, 10])


def test_the_table_says_that_a_cost_is_of_the_whole_run(
    arms: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for arm in arms:
        if arm != "--baseline":
            file = Path(arm, "summary.json")
            file.write_text(json.dumps(json.loads(file.read_text()) | {"tokens": 400}))
    assert main(["compare", *arms, "--at", "tokens=300"]) == 0
    assert "tokens per whole run" in capsys.readouterr().out
    assert main(["compare", *arms]) == 0
    assert "tokens per run" in capsys.readouterr().out


@pytest.mark.parametrize(("size", "right"), [(250, 40), (350, 50), (200, 40)])
def test_the_counts_are_those_of_the_nearer_evaluation(
    size: int, right: int, pair: list[str]
) -> None:
    answers = RunAtBudget(Path(pair[0]), None, Budget(size)).answers
    assert answers is not None and answers.right.sum() == right


def test_evaluations_of_other_problems_have_no_line_between_them(pair: list[str]) -> None:
    file = Path(pair[0], "evaluation.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for record in records:
        if record["step"] == 4:
            record["example_id"] += "-other"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(ConfigurationError, match="other problems"):
        _ = RunAtBudget(Path(pair[0]), None, Budget(300)).answers


@pytest.mark.parametrize(
    ("change", "at", "sentence"),
    [
        ({}, "tokens=500", "short of --at tokens=500; use tokens=400 or less."),
        ({"tokens_per_s": None}, "tokens=100", "step 0, does not tell its tokens"),
        ({}, "updates=8", "--at updates=8 left in 0.10; give tokens=N"),
    ],
)
def test_a_run_that_does_not_reach_the_budget_is_refused(
    change: Any, at: str, sentence: str, pair: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run_of(Path(pair[0]), 1, "maxrl", 100, (30, 40, 50), **change)
    assert main(["compare", *pair, "--at", at]) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_a_run_without_an_evaluation_before_the_budget_is_refused(
    pair: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in (pair[0], pair[2]):
        file = Path(folder, "evaluation.jsonl")
        later = [line for line in file.read_text().splitlines() if '"step": 0' not in line]
        file.write_text("\n".join(later) + "\n")
    assert main(["compare", *pair, "--at", "tokens=50"]) == 2
    assert "[evaluation] at_start = true" in capsys.readouterr().err


def test_a_budget_below_the_first_step_is_named(
    pair: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *pair, "--metric", "correct_rate", "--at", "tokens=50"]) == 2
    assert "had not made its first step at --at tokens=50" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["tokens", "steps=3", "tokens=0", "tokens=-1", "tokens=x", "tokens=1e999"]
)
def test_what_is_no_budget_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a budget; give tokens=N with N from 1"):
        Budget.parse(text)


def test_a_budget_may_be_written_with_underscores_and_powers() -> None:
    assert Budget.parse("tokens=2_000_000") == Budget.parse("tokens=2e6")

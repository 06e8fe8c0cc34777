"""A run that learns nothing says so and why: at the start, after three steps, at its end and in
`retrain status`. It is never stopped.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from runs import lines, small

from retrain.analysis.status import overview
from retrain.config import TrainConfig
from retrain.explain.inputs import check_inputs
from retrain.records.entries import StepRecord
from retrain.records.untrained import Streak, is_news, untrained_line
from retrain.rewards import unpaid_answer
from retrain.run.notes import unasked_note
from retrain.types import Example
from tests.runs import small_run


def step(**values: Any) -> StepRecord:
    """A step of two groups of four that trained nothing; all wrong unless told otherwise."""
    shape = {"num_datums": 0, "batch_size": 2, "group_size": 4, "truncated_fraction": 0.0}
    rewards = {"mean_reward": 0.0, "reward_std": 0.0, "informative_fraction": 0.0}
    counts = skipped(0, 2, 0) | {"groups_identical": 0, "condition": "a+b"}
    return StepRecord(step=0, **(shape | rewards | counts | values))


def skipped(right: int, wrong: int, other: int) -> dict[str, int]:
    counts = {"all_correct": right, "all_wrong": wrong, "other": other}
    return {f"groups_skipped_{reason}": count for reason, count in counts.items()}


TRAINED = step(num_datums=4, informative_fraction=0.5, groups_skipped_all_wrong=1)
SOLVED = step(**skipped(2, 0, 0), mean_reward=1.0)


FOUND = "answer_found_rate"
CUT = "truncated_fraction"
CAUSES: list[tuple[str, dict[str, Any]]] = [
    (r"nothing: 0 of 24 completions hold \boxed{}; unless the prompts ask for", {FOUND: 0.0}),
    (r"; unless the prompts ask for one, set [data] prompt", {FOUND: 0.0}),
    (r"\boxed{}.'; a box in a thought does not count.", {FOUND: 0.0}),
    (r": 0 of 24 completions hold \boxed{}, 12 were cut at [training]", {FOUND: 0.0, CUT: 0.5}),
    ("all 24 completions were cut at [training] max_tokens and 0 of 24", {FOUND: 0.0, CUT: 1.0}),
    (r"completions are wrong (12 of 24 completions hold \boxed{}); use easier", {FOUND: 0.5}),
    ("all 24 completions are wrong; use easier", {"reward_std": 0.1, "mean_reward": 0.2}),
    ("all 24 completions were cut at [training] max_tokens; raise it", {CUT: 1.0}),
    ("all 24 completions have the reward 0.3; `retrain audit` shows", {"mean_reward": 0.3}),
    ("all 24 completions have the reward 0; `retrain audit` shows", {}),
    (
        "none of 24 completions could be judged",
        {"mean_reward": None, "reward_std": None, "groups_skipped_other": 2},
    ),
    ("were cut", {CUT: 1.0, "groups_identical": 2}),  # as short beginnings are
    ("the completions of each group are the same, token by token", {"groups_identical": 2}),
    (
        "no group has completions that differ in their reward (3 groups all right, 3 all wrong, 0",
        {**skipped(1, 1, 0), "mean_reward": 0.5, "reward_std": 0.5},
    ),
    (  # an advantage of one's own that gives 0 where rewards differ
        "every advantage is 0 (0 groups all right, 0 all wrong, 6 neither); use a larger",
        {**skipped(0, 0, 2), "mean_reward": 0.6, "reward_std": 0.5},
    ),
    (
        "nothing: every update was skipped, since a number was not finite",
        {"num_datums": 8, "informative_fraction": 0.5, "nonfinite_updates": 2, "loss": None},
    ),
    # A KL term trains all rows.
    ("3 steps trained on no reward: 0 of 24", {"num_datums": 8, FOUND: 0.0}),
]


@pytest.mark.parametrize(("words", "values"), CAUSES)
def test_the_line_names_the_cause_that_the_records_show(words: str, values: dict[str, Any]) -> None:
    line = untrained_line(Streak.of([step(**values)] * 3), TrainConfig())
    assert line.startswith("3 steps trained ") and words in line and line.endswith(".")


def test_a_dialogue_may_be_cut_by_the_models_context_too() -> None:
    config = small(Path("run"), environment={"provider": "a.B"})
    line = untrained_line(Streak.of([step(**{CUT: 1.0})] * 3), config)
    assert "max_tokens or the end of the model's context; raise it" in line


@pytest.mark.parametrize(("mode", "label"), [("none", "mine"), ("grpo", "none+mine")])
def test_the_advantage_and_not_its_label_says_that_nothing_gets_credit(
    mode: str, label: str
) -> None:
    config = small(Path("run"), algorithm={"advantage_mode": mode}, logging={"label": label})
    line = untrained_line(Streak.of([step(condition=label)] * 3), config)
    assert ('advantage_mode = "none" gives no credit; set another' in line) == (mode == "none")


def test_steps_that_are_all_right_are_solved_and_not_steps_that_taught_nothing() -> None:
    solved = untrained_line(Streak.of([SOLVED] * 3), TrainConfig())
    assert solved.startswith("3 steps had nothing to learn: all 24 completions are right")
    mixed = untrained_line(Streak.of([SOLVED, step(), SOLVED, step()]), TrainConfig())
    assert mixed.startswith("2 steps trained nothing: all 16 completions have the reward 0")
    assert untrained_line(Streak(), TrainConfig()) == ""


def test_it_is_told_once_a_streak_when_three_steps_of_a_kind_are_there() -> None:
    def told(*steps: StepRecord) -> list[int]:
        streaks = [Streak.of(steps[: end + 1]) for end in range(len(steps))]
        return [end for end, streak in enumerate(streaks) if is_news(streak)]

    assert told(*[step()] * 6) == [2]
    assert told(*[SOLVED] * 6) == [2]
    assert told(step(), SOLVED, step(), SOLVED, step(), SOLVED) == [4]
    assert told(step(), step(), TRAINED, step(), step()) == []
    assert told(*[step()] * 3, TRAINED, *[step()] * 3) == [2, 6]


def test_a_constant_reward_of_ones_own_is_named_on_screen_in_summary_and_status(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "constant_reward.py").write_text("def score(response, reference): return 0.25\n")
    reward = {"type": "custom", "custom_module": "constant_reward"}
    run = small_run(small(here / "run", reward=reward))
    told = [line for line in capsys.readouterr().out.splitlines() if "trained nothing" in line]
    expected = [
        f"{steps} steps trained nothing: all {8 * steps} completions have the reward 0.25"
        for steps in (3, 4)
    ]
    assert [line.split(";")[0] for line in told] == expected
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["untrained"] == told[1] == run.summary.untrained
    assert overview(run.folder).runs[0].loss_note == told[1]
    for line in lines(run.folder / "metrics.jsonl"):
        assert (line["reward_std"], line["answer_found_rate"]) == (0.0, None)


def test_a_run_whose_every_update_was_skipped_says_so_at_its_end(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "huge_advantage.py").write_text(
        "def huge(rewards): return [1e30 * (reward - 0.5) for reward in rewards]\n"
    )
    algorithm = {"advantage_mode": "huge_advantage.huge"}
    run = small_run(small(here / "run", algorithm=algorithm, training={"max_steps": 2}))
    said = (
        "2 steps trained nothing: every update was skipped, since a number was not finite; look at"
        " max_abs_advantage, or lower [training] lr."
    )
    assert run.summary.untrained == said == overview(run.folder).runs[0].loss_note
    lines_ = capsys.readouterr().out.splitlines()
    assert "Step 0: gradient norm was not finite, skipped 1 update." in lines_ and said in lines_


def test_a_model_that_is_not_asked_for_a_box_gets_a_template_and_then_a_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lab model from a folder, as any other; in 4 tokens it does not come to its answer."""
    lab = Path(__file__).parents[1] / "retrain" / "assets" / "lab"
    (tmp_path / "sums.jsonl").write_text(
        "".join(f'{{"prompt": "{n}+1=?", "answer": "{n + 1}"}}\n' for n in range(4))
    )
    sections = {
        "model": {"model": str(lab)},
        "data": {"source": str(tmp_path / "sums.jsonl")},
        "reward": {"type": "match"},
    }
    training = {"max_tokens": 4, "max_steps": 3}
    run = small_run(small(tmp_path / "run", **sections, training=training))
    said = capsys.readouterr().out
    (asked,) = [line for line in said.splitlines() if "none of 4 prompts asks" in line]
    assert r"Set [data] prompt_template = '{prompt} Put the final answer in \boxed{}.'" in asked
    assert "3 steps trained nothing: all 24 completions were cut" in said
    assert r"0 of 24 completions hold \boxed{}" in said
    assert run.summary.steps == 3
    assert [line["answer_found_rate"] for line in lines(run.folder / "metrics.jsonl")] == [0.0] * 3


@pytest.mark.parametrize(
    ("sections", "prompt", "words"),
    [
        ({}, "1+1=?", "'{prompt} Put the final answer in"),
        (
            {"data": {"prompt_template": "Q: {prompt}"}},
            "Q: 1+1=?",
            r'prompt_template = "Q: {prompt} Put the final answer in \\boxed{}."',
        ),
        (
            {"reward": {"type": ["math", "random"], "weights": [0.5, 0.5]}},
            "1+1=?",
            '["math", "random"] reads',
        ),
        ({}, r"1+1=? Put the answer in \boxed{}.", ""),
        ({"reward": {"type": "random"}}, "1+1=?", ""),
        ({"model": {"model": "lab"}}, "1+1=?", ""),
    ],
)
def test_only_prompts_without_a_box_under_a_reward_that_reads_one_are_told(
    sections: dict[str, Any], prompt: str, words: str
) -> None:
    config = TrainConfig.model_validate({"reward": {"type": "match"}} | sections)
    note = unasked_note(config, [prompt])
    assert words in note and bool(note) == bool(words)


def test_references_that_hold_more_than_the_answer_are_named_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sums.jsonl").write_text(
        "".join(f'{{"prompt": "{n}+1=?", "answer": "{n + 1}.0"}}\n' for n in range(4))
    )
    sections = {"data": {"source": str(tmp_path / "sums.jsonl")}, "reward": {"type": "match"}}
    config = small(tmp_path / "run", **sections, training={"max_steps": 3})
    note = (
        '4 of 4 references hold more than the answer. For example, [reward] type = "match" gives 0 to'
        " 1 for '1.0' (sums-0). Write the bare answer there"
    )
    assert check_inputs(config) == f"{note}."
    run = small_run(config)
    cause = f"3 steps trained nothing: all 24 completions are wrong; {note}."
    assert {f"{note}.", cause} <= set(capsys.readouterr().out.splitlines())
    assert run.summary.untrained == cause


@pytest.mark.parametrize(
    ("reward", "reference", "bare"),
    [
        ({"type": "match"}, "137.0", "137"),
        ({"type": "match"}, "$x+1$", "x+1"),
        ({"type": "match", "normalize": "hendrycks"}, "$5$", "5"),
        ({"type": ["math", "random"]}, "3 and 4 make\n#### 7", "7"),
        ({"type": "math"}, "It is\n7", "7"),
        ({"type": "match"}, "2.50", ""),
        ({"type": "match"}, "$5 and $6", ""),
        ({"type": "math"}, "137.0", ""),
        ({"type": "math"}, "$x+1$", ""),
        ({"type": "math"}, "\\begin{pmatrix}1\\\\\n2\\end{pmatrix}", ""),
        ({"type": "random"}, "137.0", ""),
    ],
)
def test_only_a_reference_whose_bare_answer_is_not_paid_is_named(
    reward: dict[str, Any], reference: str, bare: str
) -> None:
    config = TrainConfig.model_validate({"reward": reward})
    assert unpaid_answer(config.reward, Example("?", reference)) == bare


def test_a_step_that_trains_nothing_is_compared_on_four_completions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing stops, however many steps are off."""
    hopeless = {"reward": {"type": "match"}, "training": {"max_steps": 5, "max_tokens": 4}}
    inference = {"engine": "faulty_engines.Drifts"}
    small_run(small(tmp_path, inference=inference, **hopeless))
    records = lines(tmp_path / "metrics.jsonl")
    assert [record["num_datums"] for record in records] == [0] * 5
    assert {record["logprob_diff_tokens"] for record in records} == {16}
    assert records[0]["logprob_diff_mean"] < 1e-5 < records[1]["logprob_diff_mean"]
    said = capsys.readouterr().out
    assert "Step 1 trained nothing. Sampler and learner differed by 0.01 nats" in said

"""`retrain compare` and `retrain power`: verdicts, what they refuse to say, and what is left out in
the open.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from campaigns import (
    EIGHT,
    compared,
    manifest_of,
    problems,
    shifted,
    shown,
    timed_pilot,
    write_arms,
    write_campaign,
    write_manifest,
    write_run,
)

from retrain.analysis.integrity import planned_values
from retrain.analysis.measures import Metric, learning_curve_mean, size_words
from retrain.cli.compare import repeated
from retrain.cli.main import main
from retrain.config import config_from_toml
from retrain.config.load import given_values
from retrain.records.entries import EvaluationRecord

BASE, BETTER, WORSE = "grpo+none", "maxrl+none", "maxrl+gtpo"


def refused(
    capsys: pytest.CaptureFixture[str], *arguments: str | Path, command: str = "compare"
) -> str:
    assert main([command, *map(str, arguments)]) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    return errors


UP = [6, 9, 7, 8, 5, 7, 9, 6]
AROUND = [3, -4, 2, -1, 4, -3, 1, 0]


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight seeds; one condition clearly better, one clearly worse, one in between."""
    down = [-by for by in UP]
    arms = {BETTER: shifted(UP), WORSE: shifted(down), "rloo+none": shifted(AROUND)}
    return write_campaign(tmp_path_factory.mktemp("campaign"), {BASE: EIGHT, **arms})


def two_arms(folder: Path, seeds: int = 3, **own: dict[str, Any]) -> list[Path | str]:
    """Arguments of a comparison of runs a1, a2, ... with b1, b2, ...; `own` are sections of an arm."""
    ours, theirs = (
        [
            write_run(folder / f"{arm}{seed}", seed, **own.get(arm, {}))
            for seed in range(1, seeds + 1)
        ]
        for arm in "ab"
    )
    return [*ours, "--baseline", *theirs]


def test_verdicts_follow_the_interval_and_the_adjusted_p(
    campaign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = compared(capsys, campaign)
    assert result["baseline"] == BASE and result["metric"] == "pass@1"
    found = {contrast["condition"]: contrast for contrast in result["contrasts"]}
    verdicts = {BETTER: "improvement", WORSE: "worse", "rloo+none": "inconclusive"}
    assert {name: item["verdict"] for name, item in found.items()} == verdicts
    assert found[BETTER]["mean_difference"] == pytest.approx(np.mean(UP) / 100)
    assert found[BETTER]["p"] == 2 / 2**8 == found[BETTER]["p_adjusted"]
    between = found["rloo+none"]
    assert between["interval"][0] < 0 < between["interval"][1]
    assert 0 < between["detectable"][0] < between["detectable"][1]


def test_another_baseline_turns_the_difference_round(
    campaign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = (campaign, "--baseline", BETTER)
    result = compared(capsys, *other)
    found = next(item for item in result["contrasts"] if item["condition"] == BASE)
    assert found["verdict"] == "worse" and found["mean_difference"] < 0
    lower = compared(capsys, *other, "--metric", "grad_norm", "--lower-is-better")
    assert lower["better"] == "lower"


def test_three_seeds_are_never_significant_however_large_the_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign = write_campaign(tmp_path, {BASE: [10, 11, 12], BETTER: [90, 91, 92]})
    (found,) = compared(capsys, campaign)["contrasts"]
    assert found["verdict"] == "inconclusive" and not found["can_conclude"]
    assert found["smallest_p_adjusted"] == 0.25 and found["interval"][0] > 0
    text = shown(capsys, campaign)
    assert "With 3 pairs the smallest possible adjusted p is 0.25" in text
    assert "1 comparison at 0.05 needs at least 6 seeds" in text
    assert "no effect" not in text and "improvement" not in text


def test_six_seeds_conclude_in_a_family_of_any_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    better = [30, 31, 32, 33, 34, 35]
    for others in ((), (WORSE, "rloo+none", "rloo+gtpo")):
        arms = {BASE: [10] * 6, **dict.fromkeys((BETTER, *others), better)}
        found = compared(capsys, write_campaign(tmp_path / str(len(others)), arms))
        assert {item["verdict"] for item in found["contrasts"]} == {"improvement"}
        assert found["seeds_to_conclude"] == 6


def test_equivalent_needs_a_stated_margin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign = write_campaign(tmp_path, {BASE: EIGHT, BETTER: shifted([1, -1, 0, 1, 0, -1, 0, 0])})
    for margin, verdict in (
        ("", "inconclusive"),
        ("0.02", "equivalent"),
        ("0.002", "inconclusive"),
    ):
        (found,) = compared(capsys, campaign, *(["--margin", margin] * bool(margin)))["contrasts"]
        assert found["verdict"] == verdict


def test_runs_that_did_not_finish_are_left_out_and_named(
    campaign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign = Path(shutil.copytree(campaign, tmp_path / "copy"))
    pending = {"name": "x", "condition": BASE, "seed": 9, "status": "pending", "dir": "runs/x"}
    with manifest_of(campaign) as manifest:
        manifest["runs"][0] |= {"status": "failed", "reason": "out of memory"}
        manifest["runs"].append(pending)
    (campaign / "runs" / f"{BASE}_s1" / "summary.json").unlink()
    (campaign / "runs" / f"{BETTER}_s2" / "summary.json").unlink()
    config = campaign / "runs" / f"{BETTER}_s2" / "config.toml"
    config.write_text(config.read_text().replace("max_steps = 2", "max_steps = 9"))
    result = compared(capsys, campaign)
    assert result["left_out"] == [
        f"{BASE}_s1 failed (out of memory).",
        f"{BETTER}_s2 stopped after 2 of 9 steps.",
        "x has not started.",
    ]
    assert result["contrasts"][0]["pairs"] == 6 and result["contrasts"][1]["pairs"] == 7
    assert any(f"{BETTER} (1)" in note for note in result["notes"])


def test_held_out_accuracy_comes_first_and_its_absence_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = two_arms(tmp_path, a={"rates": [0.1, 0.3]}, b={"rates": [0.1, 0.22]})
    result = compared(capsys, *arguments)
    assert result["metric"] == "correct_rate"
    assert "No run has a held-out accuracy" in result["notes"][0]
    assert result["contrasts"][0]["mean_difference"] == pytest.approx((0.4 - 0.32) / 2)
    right, wrong = problems([1, 1, 1, 0]), problems([1, 0, 0, 0])
    result = compared(capsys, *two_arms(tmp_path, a={"held_out": right}, b={"held_out": wrong}))
    assert result["metric"] == "pass@1" and result["notes"] == []
    assert result["contrasts"][0]["mean_difference"] == pytest.approx(0.5)
    assert result["baseline"] == str(tmp_path / "b1 ...")
    assert result["contrasts"][0]["condition"] == str(tmp_path / "a1 ...")


def test_folders_of_one_name_are_told_apart_as_they_were_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for parent, mode in (("a", "maxrl"), ("b", "maxrl"), ("c", "maxrl"), ("d", "grpo")):
        write_run(Path(parent, "run"), 1, algorithm={"advantage_mode": mode})
    Path("c/run/summary.json").write_text('{"status": "failed"}', encoding="utf-8")
    result = compared(capsys, "a/run", "d/run", "--baseline", "b/run")
    assert [arm["label"] for arm in result["arms"]] == ["b/run", "grpo+none", "a/run"]
    said = refused(capsys, "c/run", "--baseline", "b/run")
    assert "seeds of b/run: 1; c/run: none). Left out: c/run failed" in said


def test_rates_are_of_first_draws_and_compared_between_runs_with_and_without_redraws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = two_arms(tmp_path, a={"training": {"max_resamples": 4}})
    assert compared(capsys, *arguments, "--metric", "correct_rate")["contrasts"][0]["pairs"] == 3


def test_an_evaluation_of_untrained_weights_is_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"held_out": problems([1, 0])}
    arguments = two_arms(tmp_path, 1, a=asked, b=asked)
    for evaluation in tmp_path.glob("*/evaluation.jsonl"):
        evaluation.write_text(evaluation.read_text().replace('"step": 2', '"step": 0'))
    assert compared(capsys, *arguments)["metric"] == "correct_rate"


def test_what_weakens_a_comparison_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unjudged = EvaluationRecord(0, "problem-2", "task", 0, 0, 1, None)
    longer = {"rates": [0.5] * 3, "held_out": [*problems([1, 0]), unjudged]}
    arguments = two_arms(tmp_path, 1, a=longer, b={"held_out": [*problems([1, 1]), unjudged]})
    evaluation = tmp_path / "a1" / "evaluation.jsonl"
    evaluation.write_text(evaluation.read_text().replace('"step": 3', '"step": 2'))
    notes = compared(capsys, *arguments)["notes"]
    for said in (
        "different steps (2 to 3)",
        "1 of 2 runs trained on",
        "2 held-out answers could not be judged",
    ):
        assert sum(said in note for note in notes) == 1, said


def test_the_last_fifty_steps_count_and_are_aligned_by_their_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps without a rate are not counted."""
    rising = [0.0] * 30 + [0.5] * 25 + [None] * 10 + [1.0] * 15
    arguments = two_arms(tmp_path, 1, a={"rates": rising}, b={"rates": [0.2] * 80})
    late = (25 * 0.5 + 15 * 1.0) / 40
    (found,) = compared(capsys, *arguments, "--metric", "correct_rate")["contrasts"]
    assert found["mean_difference"] == pytest.approx(late - 0.2)
    for curve in ([[0, 10, 20], [0.0, 0.5, 1.0]], [[0, 20], [0.0, 1.0]]):
        assert learning_curve_mean(np.array(curve)) == pytest.approx(0.5)
    assert 0 < compared(capsys, *arguments, "--metric", "auc")["arms"][1]["mean"] < late


def test_rounding_is_shown_as_nothing() -> None:
    rate = Metric("pass@1", "", is_rate=True)
    assert (size_words(1.1e-9, rate), size_words(4.2e-4, rate)) == ("0.0 pp", "0.042 pp")


def test_shared_noise_is_what_the_engines_and_prompts_of_a_pair_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for name, sections in {
        "same": {"algorithm": {"transform_mode": "gtpo"}},
        "server": {"inference": {"engine": "vllm", "url": "http://127.0.0.1:8000"}},
        "batch": {"training": {"batch_size": 4}},
    }.items():
        arguments = two_arms(tmp_path / name, 2, a=sections)
        (found[name],) = compared(capsys, *arguments)["contrasts"]
    shared = {arm: (item["same_prompts"], item["shared_noise"]) for arm, item in found.items()}
    assert shared == {"same": (2, 2), "server": (2, 0), "batch": (0, 0)}
    assert found["same"]["differing_keys"] == ["algorithm.transform_mode"]
    assert found["batch"]["differing_keys"] == ["training.batch_size"]


def test_the_control_is_the_random_reward_arm_and_compared_by_its_held_out_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def own(label: str, seed: int) -> dict[str, Any]:
        right, rate, reward = 15, 0.6, "match"
        if label != BASE:
            right, rate, reward = 10 + seed % 3, 0.5 + seed / 1000, "random"
        answers = problems([1] * right + [0] * (20 - right))
        return {"rates": [0.3, rate], "held_out": answers, "reward": {"type": reward}}

    write_arms(tmp_path, (BASE, "control"), range(1, 9), own)
    result = compared(capsys, tmp_path, "--control")
    assert (result["baseline"], result["metric"], result["judge"]) == ("control", "pass@1", "match")
    assert result["contrasts"][0]["verdict"] == "improvement"
    assert "control, trained on random rewards" in result["notes"][0]
    said = refused(capsys, tmp_path, "--control", "--metric", "correct_rate")
    assert "control by match" not in said and "--metric pass@1" in said
    assert "judged by match, and the baseline by random" in said


CUSTOM = {"type": "custom", "custom_module": "mine"}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"reward": CUSTOM}, 'by custom (custom_module = "mine"), and the baseline by match'),
        ({"reward": CUSTOM, "evaluation": {"reward": "match"}}, ""),
        (
            {"reward": {"type": "match", "normalize": "hendrycks"}},
            'judged by match (normalize = "hendrycks"), and the baseline by match',
        ),
        ({"reward": {"type": "match"}}, ""),
    ],
)
def test_held_out_answers_that_different_rewards_judged_are_not_compared(
    sections: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = {"control": {"reward": {"type": "random"}}, BASE: sections, BETTER: {}}
    folder = write_arms(
        tmp_path, arms, (1, 2), lambda label, s: {"held_out": problems([1, s - 1])} | arms[label]
    )
    result = compared(capsys, folder, "--control")
    conditions = [contrast["condition"] for contrast in result["contrasts"]]
    assert conditions == ([BETTER] if words else [BASE, BETTER])
    assert (words in result["left_out"][0]) if words else not result["left_out"]


def test_several_tasks_get_an_iqm_beside_the_mean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = {BASE: [2, 1, 0, 4], BETTER: [3, 1, 1, 4]}
    folder = write_arms(
        tmp_path, right, (1, 2, 3), lambda label, _: {"held_out": problems(right[label], 4, 4)}
    )
    result = compared(capsys, folder)
    (contrast,) = result["contrasts"]
    assert result["arms"][0]["tasks"]["iqm"] == pytest.approx((0.25 + 0.5) / 2)
    assert contrast["tasks"]["iqm_difference"] == pytest.approx(0.5 - 0.375)
    won = (1 + 0.5 + 1 + 0.5) / 4
    assert contrast["tasks"]["probability_of_improvement"] == pytest.approx(won)
    assert contrast["problem_interval"][0] < 0.125 < contrast["problem_interval"][1]
    text = shown(capsys, folder, "--format", "markdown")
    assert "a run beats the baseline's" in text and "interval for new runs" in text


def test_text_fits_the_terminal_and_says_all_that_markdown_does(
    campaign: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = ["compare", str(campaign), "--effect", "0.02", "--format"]
    assert main([*told, "markdown"]) == 0
    markdown = capsys.readouterr().out
    whole = " ".join(markdown.split())
    assert re.search(r"\| maxrl\+none \| 8 \| \+7\.1 pp [^\n]*improvement \|", whole)
    for words in ("the same sampling noise", "you need", "Held-out pass@1"):
        assert words in whole
    rows = markdown.splitlines()
    said = [line.lstrip("- ").replace("**", "") for line in rows if line.startswith(("- ", "  "))]
    cells = {cell.strip() for line in rows if line.startswith("| ") for cell in line.split("|")}
    assert len(said) > 6
    for width in (66, 80, 140):
        monkeypatch.setenv("COLUMNS", str(width))
        assert main([*told, "text"]) == 0
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= width
        text = " ".join(text.split())
        missing = [part for part in (*said, *cells) if part.replace("*", "") not in text]
        assert not missing, width


def test_an_interval_without_zero_is_no_verdict_where_the_family_does_not_reach_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by = [9, 2, 7, 1, 8, 3, 6, -1]
    arms = {BASE: EIGHT, BETTER: shifted(by), WORSE: shifted(by[::-1])}
    arms["rloo+none"] = shifted([0, 1, -1, 0, 2, -2, 1, -1])
    found = compared(capsys, write_campaign(tmp_path, arms))["contrasts"][0]
    assert found["verdict"] == "inconclusive" and found["interval"][0] > 0
    assert found["p"] < 0.05 < found["p_adjusted"]
    told = "Its own interval excludes 0, but the adjusted p over 3 comparisons"
    assert told in found["explanation"]


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--baseline", "grpo+nothing"], "the conditions are grpo+none"),
        (["--metric", "running_correct_rate"], "lags"),
        (["--metric", "accurracy"], "is not a metric"),
        (["--metric", "pass@64"], "no pass@64"),
        (["--margin", "2"], "two points are 0.02"),
        (["--margin", "0"], "above 0"),
        (["--alpha", "1.5"], "between 0 and 1"),
        (["--control"], "random"),
        (["--control", "--baseline", BASE], "give one."),
        (
            ["--lower-is-better"],
            "--lower-is-better is not for pass@1, a rate of right answers: more is better",
        ),
        (["--metric", "auc", "--lower-is-better"], "is not for auc"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_sentence(
    arguments: list[str], says: str, campaign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(capsys, campaign, *arguments)


def test_runs_that_make_no_pair_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, other = (
        write_run(tmp_path / "one", 1),
        write_run(tmp_path / "two", 2),
        write_run(tmp_path / "other", 1),
    )
    assert "no pair" in refused(capsys, one, "--baseline", two)
    assert "are both maxrl+none with seed 1" in refused(capsys, one, other, "--baseline", two)
    assert "both sides" in refused(capsys, one, "--baseline", one)
    assert "need --baseline" in refused(capsys, one)
    assert "holds no run" in refused(capsys, one, "--baseline", tmp_path / "nowhere")
    assert "is not a folder" in refused(capsys, tmp_path / "nowhere")


def test_different_held_out_problems_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write_run(tmp_path / "one", 1, held_out=problems([1, 0]))
    two = write_run(tmp_path / "two", 1, held_out=problems([1, 0, 1]))
    told = "different held-out problems (3 and 2, 2 shared)"
    assert told in refused(capsys, one, "--baseline", two)
    edited: dict[str, Any] = {"heldout_sha256": {"lab": "an edited file"}}
    other = write_run(tmp_path / "other", 1, held_out=problems([1, 0]), environment=edited)
    told = "(the same ids with other texts or references)"
    assert told in refused(capsys, one, "--baseline", other)
    edited["heldout_sha256"] = None  # as in 0.9
    old = write_run(tmp_path / "old", 1, held_out=problems([1, 0]), environment=edited)
    assert main(["compare", str(one), "--baseline", str(old)]) == 0


def test_a_baseline_without_a_finished_run_is_no_matter_of_judges(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = [
        {"condition": BASE, "seed": 1, "status": "failed", "reason": "out of memory"},
        {"condition": BETTER, "seed": 1},
    ]
    write_run(tmp_path / "runs" / f"{BETTER}_s1", 1, held_out=problems([1, 0]))
    said = refused(capsys, write_manifest(tmp_path, entries))
    assert "seeds of grpo+none: none" in said and "judged" not in said and "out of memory" in said


def test_a_baseline_flag_takes_all_that_follow_it() -> None:
    given = "a --baseline b c --metric auc --baseline=d"
    again = "a --baseline b --baseline c --metric auc --baseline=d"
    assert repeated(given.split(), "--baseline") == again.split()


# -- planning --------------------------------------------------------------------------------------


def planned(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    assert main(["power", *map(str, arguments), "--json"]) == 0, capsys.readouterr().err
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_power_of_a_given_spread(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--sd", "0.02", "--effect", "0.013")
    assert planned(capsys, *given)["seeds_needed"] == 21
    more = planned(capsys, *given, "--comparisons", "4")
    assert more["seeds_needed"] > 21
    assert more["detectable"]["6"] is not None and more["detectable"]["4"] is None


def test_power_of_a_pilot_takes_the_spread_of_its_differences(
    campaign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = planned(capsys, campaign, "--effect", "0.02")
    variances = np.var([UP, UP, AROUND], axis=1, ddof=1)
    assert result["sd"] == pytest.approx(np.sqrt(np.mean(variances)) / 100)
    assert result["comparisons"] == 3
    low, high = result["seeds_needed_interval"]
    assert low <= result["seeds_needed"] <= high


def test_a_pilot_that_recorded_its_times_gives_the_cheapest_design(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The runs have luck of their own: beyond some evaluation only seeds help, and an answer costs
    a thousandth of a run.
    """
    timed_pilot(tmp_path)
    small, large = (
        planned(capsys, tmp_path, "--effect", effect)["cheapest"] for effect in ("0.08", "0.2")
    )
    assert small["detectable"] <= 0.08 and small["seeds"] > large["seeds"] >= 6
    seconds = 800 + 0.8 * small["problems"] * small["samples"]
    assert small["hours"] == pytest.approx(2 * small["seeds"] * seconds / 3600)


def test_power_of_a_pilot_with_one_condition_assumes_independent_arms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = [0.50, 0.54, 0.52, 0.60]
    for seed, rate in enumerate(rates):
        write_run(tmp_path / f"s{seed}", seed, rates=[rate, rate])
    assert planned(capsys, tmp_path)["sd"] == pytest.approx(np.sqrt(2) * np.std(rates, ddof=1))


def test_power_refuses_what_shows_no_spread(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "only", 1)
    for arguments, told in (
        ([tmp_path], "at least two seeds"),
        ([], "give a pilot's folder, or --sd"),
        ([tmp_path, "--sd", "0.1"], "or --sd alone"),
        (["--sd", "0.1", "--metric", "nonsense"], "--metric needs the folder"),
        (["--sd", "0.1", "--effect", "0"], "needs infinitely many seeds"),
        (["--sd", "-0.1"], "is not a positive number"),
        (["--sd", "0"], "--sd 0 is not a positive number"),
    ):
        assert told in refused(capsys, *arguments, command="power")


def test_a_pilot_whose_runs_answered_different_problems_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {BASE: 20, BETTER: 10}

    def own(label: str, seed: int) -> dict[str, Any]:
        return {"held_out": problems([1] * (4 + seed) + [0] * (asked[label] - 4 - seed))}

    write_arms(tmp_path, asked, (1, 2), own)
    told = "on different held-out problems (20 and 10, 10 shared)"
    assert told in refused(capsys, tmp_path, command="power")


@pytest.mark.parametrize("shared", [False, True])
def test_a_grids_conditions_are_ranked_and_the_ranking_is_called_a_selection(
    shared: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = {BASE: [40, 42], BETTER: [46, 44]} | ({WORSE: [44, 46]} if shared else {})
    path = write_campaign(tmp_path, arms)
    assert "Ranking" not in shown(capsys, path)
    with manifest_of(path) as manifest:
        manifest["config"] = {"campaign": {"grid": {"training.lr": [1e-4]}}}
    text = shown(capsys, path)
    places = "- 1. maxrl+gtpo 45.0% - 3." if shared else "- 2."
    assert f"- 1. maxrl+none 45.0% {places} grpo+none 41.0%" in text
    first = "2 of 3 share the first place" if shared else "the best of 2 means"
    assert f"a selection, not a test: {first}" in text
    assert compared(capsys, path)["ranking"] == [BETTER, *[WORSE] * shared, BASE]


@pytest.mark.parametrize(
    "conditions",
    [
        "",
        "[[campaign.conditions]]\nadvantage_mode = 'grpo'\ntransform_mode = 'none'\nloss.mode = 'ppo'\n",
    ],
)
def test_a_run_of_a_grid_is_held_against_the_grids_value_and_not_the_files(conditions: str) -> None:
    text = f"""
[algorithm]
advantage_mode = "maxrl"
transform_mode = "none"
[training]
lr = 1e-3
[campaign]
seeds = [1, 2]
{conditions}
[campaign.grid]
"training.lr" = [3e-4, 1e-3]
"""
    config = config_from_toml(text)
    given = given_values(config)
    planned = [planned_values(given, condition.label) for condition in config.conditions]
    assert [values["training.lr"] for values in planned] == [3e-4, 1e-3]
    assert all(values.get("loss.mode") == ("ppo" if conditions else None) for values in planned)


def test_keys_and_values_that_a_campaign_of_0_10_gave_are_held_against_todays_names() -> None:
    given = {"algorithm": {"reference": "gold"}, "data": {"path": "gold"}}
    found = planned_values(given | {"training": {"dynamic_sampling": 2}}, "maxrl+none")
    assert found.pop("data.path") == "gold"  # a path, not a teacher
    assert found == {"algorithm.teacher": "answer", "training.max_resamples": 2}

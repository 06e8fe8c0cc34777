"""`retrain compare` and `retrain power`: verdicts, what they refuse to say, and what is left out in
the open.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from campaigns import (
    EIGHT,
    compared,
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


@pytest.fixture
def campaign(tmp_path: Path) -> Path:
    """Eight seeds; one condition clearly better, one clearly worse, one in between."""
    arms = {
        BASE: EIGHT,
        BETTER: shifted([6, 9, 7, 8, 5, 7, 9, 6]),
        WORSE: shifted([-6, -9, -7, -8, -5, -7, -9, -6]),
        "rloo+none": shifted([3, -4, 2, -1, 4, -3, 1, 0]),
    }
    return write_campaign(tmp_path / "campaign", arms)


def test_verdicts_follow_the_interval_and_the_adjusted_p(
    campaign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = compared(capsys, campaign)
    assert result["baseline"] == BASE and result["metric"] == "pass@1"
    by_condition = {contrast["condition"]: contrast for contrast in result["contrasts"]}
    assert {name: item["verdict"] for name, item in by_condition.items()} == {
        BETTER: "improvement",
        WORSE: "worse",
        "rloo+none": "inconclusive",
    }
    better = by_condition[BETTER]
    assert better["mean_difference"] == pytest.approx(np.mean([6, 9, 7, 8, 5, 7, 9, 6]) / 100)
    assert better["p"] == 2 / 2**8 and better["p_adjusted"] == 2 / 2**8
    assert by_condition["rloo+none"]["interval"][0] < 0 < by_condition["rloo+none"]["interval"][1]
    assert (
        0 < by_condition["rloo+none"]["detectable"][0] < by_condition["rloo+none"]["detectable"][1]
    )


def test_another_baseline_turns_the_difference_round(
    campaign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = compared(capsys, campaign, "--baseline", BETTER)
    found = next(item for item in result["contrasts"] if item["condition"] == BASE)
    assert found["verdict"] == "worse" and found["mean_difference"] < 0
    lower = compared(
        capsys, campaign, "--baseline", BETTER, "--metric", "grad_norm", "--lower-is-better"
    )
    assert lower["better"] == "lower"


def test_three_seeds_are_never_significant_however_large_the_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign = write_campaign(tmp_path, {BASE: [10, 11, 12], BETTER: [90, 91, 92]})
    (found,) = compared(capsys, campaign)["contrasts"]
    assert found["verdict"] == "inconclusive" and not found["can_conclude"]
    assert found["smallest_p_adjusted"] == 0.25 and found["interval"][0] > 0
    text = shown(capsys, campaign)
    assert (
        "With 3 pairs the smallest possible adjusted p is 0.25" in text
        and "1 comparison at 0.05 needs at least 6 seeds" in text
    )
    assert "no effect" not in text and "improvement" not in text


def test_six_seeds_conclude_in_a_family_of_any_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = {BASE: [10] * 6, BETTER: [30, 31, 32, 33, 34, 35]}
    alone = compared(capsys, write_campaign(tmp_path / "one", arms))
    assert alone["contrasts"][0]["verdict"] == "improvement" and alone["seeds_to_conclude"] == 6
    others = {name: [30, 31, 32, 33, 34, 35] for name in (WORSE, "rloo+none", "rloo+gtpo")}
    four = write_campaign(tmp_path / "four", {**arms, **others})
    family = compared(capsys, four)
    assert {item["verdict"] for item in family["contrasts"]} == {"improvement"} and family[
        "seeds_to_conclude"
    ] == 6


def test_equivalent_needs_a_stated_margin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign = write_campaign(tmp_path, {BASE: EIGHT, BETTER: shifted([1, -1, 0, 1, 0, -1, 0, 0])})
    assert compared(capsys, campaign)["contrasts"][0]["verdict"] == "inconclusive"
    assert compared(capsys, campaign, "--margin", "0.02")["contrasts"][0]["verdict"] == "equivalent"
    assert (
        compared(capsys, campaign, "--margin", "0.002")["contrasts"][0]["verdict"] == "inconclusive"
    )


def test_runs_that_did_not_finish_are_left_out_and_named(
    campaign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = json.loads((campaign / "manifest.json").read_text())
    manifest["runs"][0] |= {"status": "failed", "reason": "out of memory"}
    (campaign / "runs" / f"{BASE}_s1" / "summary.json").unlink()
    manifest["runs"].append(
        {"name": "x", "condition": BASE, "seed": 9, "status": "pending", "dir": "runs/x"}
    )
    (campaign / "manifest.json").write_text(json.dumps(manifest))
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
    for seed in (1, 2, 3):
        write_run(tmp_path / f"a{seed}", seed, rates=[0.1, 0.3])
        write_run(tmp_path / f"b{seed}", seed, rates=[0.1, 0.2 + seed / 100])
    ours, theirs = ([tmp_path / f"{arm}{seed}" for seed in (1, 2, 3)] for arm in "ab")
    arguments = [*ours, "--baseline", *theirs]
    result = compared(capsys, *arguments)
    assert (
        result["metric"] == "correct_rate"
        and "No run has a held-out accuracy" in result["notes"][0]
    )
    assert result["contrasts"][0]["mean_difference"] == pytest.approx((0.4 - 0.32) / 2)
    for seed in (1, 2, 3):
        for arm, right in (("a", 3), ("b", 1)):
            write_run(
                tmp_path / f"{arm}{seed}", seed, held_out=problems([1] * right + [0] * (4 - right))
            )
    result = compared(capsys, *arguments)
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
    for seed in (1, 2, 3):
        write_run(tmp_path / f"a{seed}", seed, training={"max_resamples": 4})
        write_run(tmp_path / f"b{seed}", seed)
    ours, theirs = ([tmp_path / f"{arm}{seed}" for seed in (1, 2, 3)] for arm in "ab")
    arguments = [*ours, "--baseline", *theirs]
    assert compared(capsys, *arguments, "--metric", "correct_rate")["contrasts"][0]["pairs"] == 3


def test_an_evaluation_of_untrained_weights_is_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arm in "ab":
        folder = write_run(tmp_path / arm, 1, held_out=problems([1, 0]))
        evaluation = folder / "evaluation.jsonl"
        evaluation.write_text(evaluation.read_text().replace('"step": 2', '"step": 0'))
    assert (
        compared(capsys, tmp_path / "a", "--baseline", tmp_path / "b")["metric"] == "correct_rate"
    )


def test_what_weakens_a_comparison_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unjudged = EvaluationRecord(0, "problem-2", "task", 0, 0, 1, None)
    one = write_run(tmp_path / "one", 1, rates=[0.5] * 3, held_out=[*problems([1, 0]), unjudged])
    two = write_run(tmp_path / "two", 1, held_out=[*problems([1, 1]), unjudged])
    (one / "evaluation.jsonl").write_text(
        (one / "evaluation.jsonl").read_text().replace('"step": 3', '"step": 2')
    )
    notes = compared(capsys, one, "--baseline", two)["notes"]
    for said in (
        "different steps (2 to 3)",
        "1 of 2 runs trained on",
        "2 held-out answers could not be judged",
    ):
        assert sum(said in note for note in notes) == 1, said


def test_the_last_fifty_steps_count_and_are_aligned_by_their_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rising = (
        [0.0] * 30 + [0.5] * 25 + [None] * 10 + [1.0] * 15
    )  # steps without a rate are not counted
    write_run(tmp_path / "a", 1, rates=rising)
    write_run(tmp_path / "b", 1, rates=[0.2] * 80)
    arguments = (tmp_path / "a", "--baseline", tmp_path / "b", "--metric")
    late = (25 * 0.5 + 15 * 1.0) / 40
    assert compared(capsys, *arguments, "correct_rate")["contrasts"][0][
        "mean_difference"
    ] == pytest.approx(late - 0.2)
    area = learning_curve_mean(np.array([[0, 10, 20], [0.0, 0.5, 1.0]]))
    assert area == pytest.approx(0.5)
    assert learning_curve_mean(np.array([[0, 20], [0.0, 1.0]])) == pytest.approx(0.5)
    assert 0 < compared(capsys, *arguments, "auc")["arms"][1]["mean"] < late


def test_rounding_is_shown_as_nothing() -> None:
    rate = Metric("pass@1", "", is_rate=True)
    assert (size_words(1.1e-9, rate), size_words(4.2e-4, rate)) == ("0.0 pp", "0.042 pp")


def test_shared_noise_is_what_the_engines_and_prompts_of_a_pair_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (1, 2):
        write_run(tmp_path / f"base{seed}", seed)
        write_run(tmp_path / f"same{seed}", seed, algorithm={"transform_mode": "gtpo"})
        write_run(
            tmp_path / f"server{seed}",
            seed,
            inference={"engine": "vllm", "url": "http://127.0.0.1:8000"},
        )
        write_run(tmp_path / f"batch{seed}", seed, training={"batch_size": 4})
    found = {}
    for arm in ("same", "server", "batch"):
        arms = [tmp_path / f"{arm}{seed}" for seed in (1, 2)]
        found[arm] = compared(capsys, *arms, "--baseline", tmp_path / "base1", tmp_path / "base2")[
            "contrasts"
        ][0]
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
    assert (
        result["contrasts"][0]["verdict"] == "improvement"
        and "control, trained on random rewards" in result["notes"][0]
    )
    said = refused(capsys, tmp_path, "--control", "--metric", "correct_rate")
    assert (
        "control by match" not in said
        and "judged by match, and the baseline by random" in said
        and "--metric pass@1" in said
    )


CUSTOM = {"type": "custom", "custom_module": "mine"}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"reward": CUSTOM},
            'grpo+none is judged by custom (custom_module = "mine"), and the baseline by match',
        ),
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
    compared_conditions = [contrast["condition"] for contrast in result["contrasts"]]
    assert compared_conditions == ([BETTER] if words else [BASE, BETTER])
    assert (words in result["left_out"][0]) if words else not result["left_out"]


def test_several_tasks_get_an_iqm_beside_the_mean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = {BASE: [2, 1, 0, 4], BETTER: [3, 1, 1, 4]}
    folder = write_arms(
        tmp_path, right, (1, 2, 3), lambda label, _: {"held_out": problems(right[label], 4, 4)}
    )
    result = compared(capsys, folder)
    assert result["arms"][0]["tasks"]["iqm"] == pytest.approx((0.25 + 0.5) / 2)
    assert result["contrasts"][0]["tasks"]["iqm_difference"] == pytest.approx(0.5 - 0.375)
    assert result["contrasts"][0]["tasks"]["probability_of_improvement"] == pytest.approx(
        (1 + 0.5 + 1 + 0.5) / 4
    )
    assert (
        result["contrasts"][0]["problem_interval"][0]
        < 0.125
        < result["contrasts"][0]["problem_interval"][1]
    )
    text = shown(capsys, folder, "--format", "markdown")
    assert "a run beats the baseline's" in text and "interval for new runs" in text


def test_markdown_shows_every_condition_and_its_verdict(
    campaign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(capsys, campaign, "--effect", "0.02", "--format", "markdown")
    assert re.search(r"\| maxrl\+none \| 8 \| \+7\.1 pp [^\n]*improvement \|", text)
    assert "the same sampling noise" in text and "you need" in text
    assert "Held-out pass@1" in text


@pytest.mark.parametrize("width", [66, 80, 140])
def test_text_fits_the_terminal_and_says_all_that_markdown_does(
    width: int, campaign: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    texts = {}
    for form in ("text", "markdown"):
        assert main(["compare", str(campaign), "--effect", "0.02", "--format", form]) == 0
        texts[form] = capsys.readouterr().out
    assert max(map(len, texts["text"].splitlines())) <= width
    text = " ".join(texts["text"].split())
    sentences = [
        line.lstrip("- ").replace("**", "")
        for line in texts["markdown"].splitlines()
        if line.startswith(("- ", "  "))
    ]
    assert len(sentences) > 6 and not [sentence for sentence in sentences if sentence not in text]
    cells = {
        cell.strip()
        for line in texts["markdown"].splitlines()
        if line.startswith("| ")
        for cell in line.split("|")
    }
    assert not [cell for cell in cells if cell.replace("*", "") not in text]


def test_an_interval_without_zero_is_no_verdict_where_the_family_does_not_reach_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by = [9, 2, 7, 1, 8, 3, 6, -1]
    arms = {
        BASE: EIGHT,
        BETTER: shifted(by),
        WORSE: shifted(by[::-1]),
        "rloo+none": shifted([0, 1, -1, 0, 2, -2, 1, -1]),
    }
    found = compared(capsys, write_campaign(tmp_path, arms))["contrasts"][0]
    assert (
        found["verdict"] == "inconclusive"
        and found["interval"][0] > 0
        and found["p"] < 0.05 < found["p_adjusted"]
    )
    assert (
        "Its own interval excludes 0, but the adjusted p over 3 comparisons" in found["explanation"]
    )


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
    assert "different held-out problems (3 and 2, 2 shared)" in refused(
        capsys, one, "--baseline", two
    )
    edited: dict[str, Any] = {"heldout_sha256": {"lab": "an edited file"}}
    other = write_run(tmp_path / "other", 1, held_out=problems([1, 0]), environment=edited)
    assert "(the same ids with other texts or references)" in refused(
        capsys, one, "--baseline", other
    )
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
    assert planned(capsys, "--sd", "0.02", "--effect", "0.013")["seeds_needed"] == 21
    more = planned(capsys, "--sd", "0.02", "--effect", "0.013", "--comparisons", "4")
    assert (
        more["seeds_needed"] > 21
        and more["detectable"]["6"] is not None
        and more["detectable"]["4"] is None
    )


def test_power_of_a_pilot_takes_the_spread_of_its_differences(
    campaign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = planned(capsys, campaign, "--effect", "0.02")
    by = [6, 9, 7, 8, 5, 7, 9, 6]
    variances = np.var([by, by, [3, -4, 2, -1, 4, -3, 1, 0]], axis=1, ddof=1)
    assert result["sd"] == pytest.approx(np.sqrt(np.mean(variances)) / 100)
    assert result["comparisons"] == 3
    assert (
        result["seeds_needed_interval"][0]
        <= result["seeds_needed"]
        <= result["seeds_needed_interval"][1]
    )


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
    assert small["hours"] == pytest.approx(
        2 * small["seeds"] * (800 + 0.8 * small["problems"] * small["samples"]) / 3600
    )


def test_power_of_a_pilot_with_one_condition_assumes_independent_arms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed, rate in enumerate([0.50, 0.54, 0.52, 0.60]):
        write_run(tmp_path / f"s{seed}", seed, rates=[rate, rate])
    assert planned(capsys, tmp_path)["sd"] == pytest.approx(
        np.sqrt(2) * np.std([0.50, 0.54, 0.52, 0.60], ddof=1)
    )


def test_power_refuses_what_shows_no_spread(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "only", 1)
    assert "at least two seeds" in refused(capsys, tmp_path, command="power")
    assert "give a pilot's folder, or --sd" in refused(capsys, command="power")
    both = refused(capsys, tmp_path, "--sd", "0.1", command="power")
    assert "give a pilot's folder, or --sd" in both
    assert "needs infinitely many seeds" in refused(
        capsys, "--sd", "0.1", "--effect", "0", command="power"
    )
    assert "is not a positive number" in refused(capsys, "--sd", "-0.1", command="power")


def test_a_pilot_whose_runs_answered_different_problems_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {BASE: 20, BETTER: 10}

    def own(label: str, seed: int) -> dict[str, Any]:
        return {"held_out": problems([1] * (4 + seed) + [0] * (asked[label] - 4 - seed))}

    write_arms(tmp_path, asked, (1, 2), own)
    assert "on different held-out problems (20 and 10, 10 shared)" in refused(
        capsys, tmp_path, command="power"
    )


def make_a_grid(campaign: Path) -> None:
    manifest = json.loads((campaign / "manifest.json").read_text())
    manifest["config"] = {"campaign": {"grid": {"training.lr": [1e-4]}}}
    (campaign / "manifest.json").write_text(json.dumps(manifest))


def test_a_grids_conditions_are_ranked_and_the_ranking_is_called_a_selection(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_campaign(tmp_path, {"grpo+none": [40, 42], "maxrl+none": [46, 44]})
    assert "Ranking" not in shown(capsys, path)
    make_a_grid(path)
    text = shown(capsys, path)
    assert "- 1. maxrl+none 45.0% - 2. grpo+none 41.0%" in text
    assert "a selection, not a test: the best of 2 means" in text
    assert compared(capsys, path)["ranking"] == ["maxrl+none", "grpo+none"]


def test_equal_means_of_a_grid_share_a_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rights = {"grpo+none": [40, 42], "maxrl+none": [46, 44], "maxrl+gtpo": [44, 46]}
    path = write_campaign(tmp_path, rights)
    make_a_grid(path)
    text = shown(capsys, path)
    assert "- 1. maxrl+none 45.0% - 1. maxrl+gtpo 45.0% - 3. grpo+none 41.0%" in text
    assert "2 of 3 share the first place" in text


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

"""What a run's own files contradict is not asserted: unjudged answers, failed runs, other data,
other evaluations, few pairs.
"""

import re
from dataclasses import fields, replace
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
    write_arms,
    write_campaign,
    write_manifest,
    write_run,
)
from groups import group

from retrain.analysis.arms import differing_environment
from retrain.analysis.measures import DIRECTIONS, choose_metric
from retrain.analysis.planned import AnalysisPlan
from retrain.analysis.runs import StoredRun
from retrain.analysis.statistics import TwoWay
from retrain.campaign import plan_campaign
from retrain.cli.main import main
from retrain.config import config_from_mapping
from retrain.errors import RunFailed
from retrain.records.entries import EvaluationRecord, StepRecord
from retrain.run.dialogues import Watcher
from retrain.run.evaluation import Evaluator
from retrain.run.rollout import Rollout

BASE, BETTER = "grpo+none", "maxrl+none"


def judged(right: int, wrong: int, unjudged: int) -> list[EvaluationRecord]:
    """One answer to each problem: right ones first, then wrong ones, then those that could not be
    judged.
    """
    counts = [(1, 1, 0)] * right + [(1, 0, 0)] * wrong + [(0, 0, 1)] * unjudged
    return [
        EvaluationRecord(0, f"problem-{index}", "task", n, c, lost, None)
        for index, (n, c, lost) in enumerate(counts)
    ]


def against_base(capsys: Any, folder: Path, name: str, show: Any = compared) -> Any:
    """Two seeds of `name` against those of `base`."""
    ours, theirs = ([folder / f"{arm}{seed}" for seed in (1, 2)] for arm in (name, "base"))
    return show(capsys, *ours, "--baseline", *theirs)


# -- answers that could not be judged --------------------------------------------------------------


def unjudged_campaign(folder: Path, lost: int) -> Path:
    """Equal arms, of one of which `lost` wrong answers could not be judged."""

    def own(label: str, seed: int) -> dict[str, Any]:
        unjudged, right = lost * (label == BETTER), EIGHT[seed - 1] + seed % 2 * (label == BETTER)
        return {"held_out": judged(right, 100 - right - unjudged, unjudged)}

    return write_arms(folder, (BASE, BETTER), range(1, 9), own)


def test_wrong_answers_that_could_not_be_judged_make_no_improvement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = compared(capsys, unjudged_campaign(tmp_path, 25))
    (found,) = result["contrasts"]
    low, high = found["unjudged_bounds"]
    assert found["mean_difference"] > 0 and low < found["mean_difference"] < high
    assert found["verdict"] == "inconclusive"
    base, better = result["arms"]
    assert (base["unjudged"], better["unjudged"], better["answered"]) == (0, 200, 800)
    assert "200 of 800" in shown(capsys, tmp_path)


def test_a_difference_is_taken_on_the_problems_that_both_runs_of_a_pair_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The base got the problems wrong that the candidate's judge lost: alone, their absence would
    look like a gain.
    """
    for seed in (1, 2):
        write_run(tmp_path / f"base{seed}", seed, held_out=judged(60, 40, 0))
        write_run(tmp_path / f"new{seed}", seed, held_out=judged(60, 20, 20), training={"lr": 2e-3})
    (found,) = against_base(capsys, tmp_path, "new")["contrasts"]
    assert found["mean_difference"] == 0.0 and found["unjudged_bounds"] == [0.0, pytest.approx(0.2)]


def test_a_clear_improvement_outlives_a_few_unjudged_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def own(label: str, seed: int) -> dict[str, Any]:
        right = 30 + seed % 3 if label == BASE else 60 + seed % 2
        return {"held_out": judged(right, 98 - right, 2)}

    folder = write_arms(tmp_path, (BASE, BETTER), range(1, 9), own)
    (found,) = compared(capsys, folder)["contrasts"]
    assert found["verdict"] == "improvement" and found["unjudged_bounds"][0] > 0.2


def test_one_missing_cell_drops_neither_its_problem_nor_its_seed() -> None:
    rng = np.random.default_rng(0)
    table = rng.normal(0, 0.1, (8, 1)) + rng.normal(0, 0.2, 40) + rng.normal(0, 0.3, (8, 40))
    whole = TwoWay.of(table)
    table[3, 7] = np.nan
    holed = TwoWay.of(table)
    assert whole and holed and (holed.seeds, holed.problems) == (8, 40)
    assert holed.interval() == pytest.approx(whole.interval(), abs=0.02)
    assert holed.residual_freedom == whole.residual_freedom - 1


class Silent:
    """A sampler whose reward judges some answers and none of the others."""

    def __init__(self, unjudged: int, total: int) -> None:
        self.group = group([None] * unjudged + [1.0] * (total - unjudged))

    def draw(self, *_: object) -> Rollout:
        return Rollout([self.group], [self.group])


def test_an_evaluation_with_too_many_unjudged_answers_fails_as_training_does() -> None:
    watcher = Watcher(lambda: None, lambda _: None)

    def evaluated(unjudged: int, limit: float) -> int:
        evaluator = Evaluator(Silent(unjudged, 40), [([], None)], [1], limit)  # type: ignore[arg-type]
        return evaluator.run(3, watcher)[0].problems[0].could_not_judge

    with pytest.raises(
        RunFailed,
        match=(
            r"9 of 40 held-out answers got no verdict \(9 times: the worker died\), more than"
            r" .*0\.1"
        ),
    ):
        evaluated(9, 0.1)
    assert evaluated(4, 0.1) == 4 and evaluated(1, 0.0) == 1 and evaluated(40, 1.0) == 40


# -- what two runs had in common -------------------------------------------------------------------


def test_same_prompts_and_an_a_a_comparison_are_what_the_runs_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machines = {
        "same": {},
        "data": {"data_sha256": "another file"},
        "heldout": {"heldout_sha256": {"lab": "another file"}},
        "traces": {"traces_sha256": "another file"},
        "torch": {"packages": {"torch": "2.12.0"}},
        "device": {"device": "cuda:0"},
        "silent": {"data_sha256": None},
    }
    for seed in (1, 2):
        for name, own in {"base": {}, **machines}.items():
            environment = {"traces_sha256": "a file"} | own
            write_run(tmp_path / f"{name}{seed}", seed, environment=environment)
    for name in machines:
        (found,) = against_base(capsys, tmp_path, name)["contrasts"]
        assert found["same_prompts"] == (0 if name in ("data", "silent") else 2), name
    said = {name: against_base(capsys, tmp_path, name, shown) for name in machines}
    assert [name for name, text in said.items() if "an A/A comparison" in text] == ["same"]
    assert "torch (2.12.0, not recorded)" in said["torch"]
    assert "device (cuda:0, not recorded)" in said["device"]
    assert "held-out problems" in said["heldout"] and "differ: traces" in said["traces"]
    assert "training data" in said["data"] and "was not recorded" in said["silent"]


def test_held_out_answers_sampled_in_different_ways_are_compared_only_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ways: dict[str, dict[str, Any]] = {
        BASE: {},
        "hot": {"training": {"temperature": 0.7}},
        "short": {"evaluation": {"max_tokens": 12}},
        "alike": {
            "training": {"temperature": 0.7, "max_tokens": 48},
            "evaluation": {"temperature": 1.0, "max_tokens": 24},
        },
    }

    def own(label: str, seed: int) -> dict[str, Any]:
        return {"held_out": problems([1, seed - 1]), **ways[label]}

    result = compared(capsys, write_arms(tmp_path, ways, (1, 2), own))
    assert [contrast["condition"] for contrast in result["contrasts"]] == ["alike"]
    left_out, hot = " ".join(result["left_out"]), "hot was evaluated at temperature 0.7"
    assert hot in left_out and "at most 12 tokens" in left_out and "--metric pass@1" in left_out
    insisted = compared(capsys, tmp_path, "--metric", "pass@1")
    assert len(insisted["contrasts"]) == 3 and not insisted["left_out"]
    assert any(hot in note for note in insisted["notes"])


def test_a_plugin_that_one_arm_names_is_no_other_code(tmp_path: Path) -> None:
    code = {"code": {"revision": "abc", "plugins": {"my.own": "11"}}}
    names = ("my.own", "my.own", "grpo", "my.owner")
    algorithms = [{"advantage_mode": name} for name in names]
    other = {"code": {"revision": "abc", "plugins": {"my.owner": "22"}}}
    mine, late, plain, longer = (
        StoredRun(write_run(tmp_path / str(place), 1, algorithm=algorithm, environment=environment))
        for place, (algorithm, environment) in enumerate(
            zip(algorithms, (code, {"code": {"revision": "abc"}}, {}, other), strict=True)
        )
    )
    assert "the plugin my.own" in [*differing_environment(mine, late)]
    assert "the plugin my.own" not in [*differing_environment(mine, plain)]
    assert not [word for word in differing_environment(mine, longer) if "plugin" in word]


def test_rewards_that_were_normalized_are_not_compared_with_plain_ones(tmp_path: Path) -> None:
    rewards, algorithm = {"type": ["match", "overlong"]}, {"advantage_mode": "grpo"}
    runs = []
    for combine in ("sum", "normalise_then_sum"):
        sections = {"reward": rewards | {"combine": combine}, "algorithm": algorithm}
        runs.append(StoredRun(write_run(tmp_path / combine, 1, [0.5], **sections)))
    for name, alike in {"correct_rate": True, "mean_reward": False, "reward_std": False}.items():
        judges = {choose_metric(name, runs).judge(run) for run in runs}
        assert len(judges) == (1 if alike else 2), name


def test_a_campaign_measures_every_condition_as_its_base_is_measured(tmp_path: Path) -> None:
    plain = {"advantage_mode": "grpo", "transform_mode": "none"}
    conditions = [
        plain,
        plain | {"label": "cold", "training": {"temperature": 0.6, "max_tokens": 12, "top_p": 0.9}},
        plain | {"label": "own", "training.temperature": 0.6, "evaluation.temperature": 0.2},
    ]
    config = config_from_mapping(
        {
            "campaign": {"seeds": [1], "conditions": conditions},
            "model": {"model": "lab"},
            "data": {"source": "lab"},
            "reward": {"type": "match"},
            "training": {"temperature": 1.0, "max_tokens": 48},
        }
    )
    runs = plan_campaign(config, tmp_path).runs
    base, cold, own = (run.config.evaluation for run in runs)
    assert base.temperature is None and base.max_tokens is None
    assert (cold.temperature, cold.max_tokens, cold.top_p) == (1.0, 48, 1.0)
    assert runs[1].config.training.temperature == 0.6 and own.temperature == 0.2


# -- equivalence -----------------------------------------------------------------------------------


def test_two_pairs_are_never_equivalent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    campaign = write_campaign(tmp_path, {BASE: [50, 50], BETTER: [50, 50]}, asked=1000)
    (found,) = compared(capsys, campaign, "--margin", "0.5", "--alpha", "0.3")["contrasts"]
    assert found["verdict"] == "inconclusive"


def test_equal_and_nearly_equal_differences_are_equivalent_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = dict.fromkeys((BASE, BETTER, "maxrl+gtpo", "rloo+gtpo"), EIGHT)
    arms["rloo+none"] = shifted([0, 0, 0, 0, 0, 0, 0, 1])
    found = compared(capsys, write_campaign(tmp_path, arms), "--margin", "0.02")["contrasts"]
    assert {item["verdict"] for item in found} == {"equivalent"}
    assert len({item["equivalence_p_adjusted"] for item in found}) == 1


def test_an_improvement_within_the_margin_says_both_and_shows_tosts_p(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign = write_campaign(tmp_path, {BASE: EIGHT, BETTER: shifted([7, 8, 7, 8, 7, 8, 7, 8])})
    (found,) = compared(capsys, campaign, "--margin", "0.2")["contrasts"]
    assert found["verdict"] == "improvement" and found["within_margin"]
    text = shown(capsys, campaign, "--margin", "0.2")
    assert ", within the margin of 20.0 pp." in text
    assert "improvement, but within the margin of 20.0 pp" in text and "p (TOST)" in text
    assert "largest difference of a pair is 8.0 pp" in text and "up to 31% of the runs" in text
    assert "within the margin" not in shown(capsys, campaign, "--margin", "0.05")


# -- which direction is better ---------------------------------------------------------------------


def test_every_number_of_a_step_can_be_a_metric_with_its_direction() -> None:
    numeric = {item.name for item in fields(StepRecord) if item.type in (int | None, float | None)}
    assert numeric == set(DIRECTIONS)
    assert set(DIRECTIONS.values()) == {"higher", "lower", None}


@pytest.mark.parametrize(
    ("metric", "verdict"),
    [("step_time_s", "worse"), ("loss", "different"), ("tokens_per_s", "improvement")],
)
def test_more_is_no_improvement_of_a_cost_or_of_what_has_no_direction(
    metric: str, verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def own(label: str, seed: int) -> dict[str, Any]:
        value = 1.0 + seed / 100 if label == BASE else 2.0 + seed / 50
        return {"measured": {metric: value}}

    folder = write_arms(tmp_path, (BASE, BETTER), range(1, 9), own)
    (found,) = compared(capsys, folder, "--metric", metric)["contrasts"]
    assert found["verdict"] == verdict


def test_pass_at_k_comes_from_the_stored_samples_whatever_k_was_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arm, right in (("one", [1, 0, 4]), ("two", [2, 0, 4])):
        write_run(tmp_path / arm, 1, held_out=problems(right, samples=4))
    result = compared(
        capsys, tmp_path / "one", "--baseline", tmp_path / "two", "--metric", "pass@2"
    )
    assert result["arms"][1]["mean"] == pytest.approx((0.5 + 0 + 1) / 3)


@pytest.mark.parametrize(
    ("baseline", "candidate", "said"), [(50, 60, True), (40, 50, True), (20, 60, False)]
)
def test_an_improvement_says_which_collapse_rate_would_undo_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], baseline: int, candidate: int, said: bool
) -> None:
    shifts = [-2, 1, 0, 2, -1, 1, -1, 0]
    arms = {BASE: [baseline] * 8, BETTER: [candidate + shift for shift in shifts]}
    text = shown(capsys, write_campaign(tmp_path / "c", arms))
    assert f"{BETTER} beats {BASE}" in text
    found = re.search(
        r"No run of maxrl\+none collapsed, but 8 runs cannot exclude a collapse rate of up to"
        r" (\d+)%\. At (\d+)% the gain would be gone",
        text,
    )
    assert bool(found) is said
    if found:
        unseen, undoing = (int(percent) / 100 for percent in found.groups())
        # What is left of it equals the baseline.
        assert candidate * (1 - undoing) == pytest.approx(baseline, abs=0.006 * candidate)
        # So many collapses show none in 8 pairs once in twenty campaigns.
        assert (1 - unseen) ** 8 == pytest.approx(0.05, abs=0.01)


# -- what a verdict may not be made of -------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main([*map(str, arguments)]) == 2
    return " ".join(capsys.readouterr().err.split())


def test_one_problem_makes_no_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, write_campaign(tmp_path / "c", {BASE: [0] * 8, BETTER: [1] * 8}, asked=1))
    assert text.startswith("Undecided on this one problem")
    assert "have no interval for new problems. Evaluate on more." in text


def test_problems_without_k_answers_do_not_make_few_problems_many(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twenty problems have eight answers, 600 have one; one of the twenty carries the difference."""
    once = [replace(one, example_id=f"m/{one.example_id}") for one in problems([1] * 600)]

    def own(label: str, _: int) -> dict[str, Any]:
        return {"held_out": [*problems([4 * (label == BETTER)] + [0] * 19, samples=8), *once]}

    folder = write_arms(tmp_path, (BASE, BETTER), range(1, 9), own)
    text = shown(capsys, folder, "--metric", "pass@8")
    assert text.startswith("Undecided in pass@8 on these 20 problems")
    assert "a few of the problems may carry the difference" in " ".join(text.split())


def test_arms_without_a_pair_of_finished_runs_are_refused_by_the_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries: list[dict[str, Any]] = []
    for seed in range(1, 9):
        write_run(tmp_path / f"runs/{BASE}_s{seed}", seed, held_out=problems([1] * 50 + [0] * 50))
        entries += [
            {"condition": BASE, "seed": seed},
            {"condition": BETTER, "seed": seed, "status": "failed", "reason": "no memory"},
        ]
    message = refused(capsys, "compare", write_manifest(tmp_path, entries))
    assert message.count("failed (no memory)") == 3 and "And 5 more runs." in message


def test_a_contrast_is_named_once_and_a_campaign_of_one_condition_is_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = {BASE: EIGHT, BETTER: EIGHT, "rloo+none": shifted([10] * 8)}
    folder = write_campaign(tmp_path / "c", arms)
    both = [f"--contrast={BETTER}:{BASE}", f"--contrast={BASE}:{BETTER}"]
    told = f"--contrast {BASE}:{BETTER} compares two conditions for the second time"
    assert told in refused(capsys, "compare", folder, *both)
    pairs = (f"rloo+none:{BASE}", f"rloo+none:{BETTER}", f"{BETTER}:{BASE}")
    text = shown(capsys, folder, *(f"--contrast={pair}" for pair in pairs))
    assert text.startswith("2 of 3 conditions beat their baselines")
    alone = write_campaign(tmp_path / "alone", {BASE: EIGHT})
    told = "has one condition, grpo+none, and a comparison takes two or more"
    assert told in refused(capsys, "compare", alone)


def test_equal_differences_and_impossible_effects_plan_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for right, effect, told in (
        (EIGHT, "0.02", "all equal, so they show no spread"),
        (shifted([*range(1, 9)]), "1.5", "--effect 1.5 is not a possible difference in pass@1"),
    ):
        folder = write_campaign(tmp_path / effect, {BASE: EIGHT, BETTER: right})
        assert told in refused(capsys, "power", folder, "--effect", effect)


# -- failed and collapsed runs ---------------------------------------------------------------------


def lost_campaign(tmp_path: Path, collapsed: int, failed: int) -> Path:
    """Eight seeds of two arms 20 points apart; of the better one some collapse and some fail."""
    right = [3 if seed < collapsed else 60 + seed % 3 for seed in range(8)]
    folder = write_campaign(tmp_path / "c", {BASE: [40] * 8, BETTER: right})
    with manifest_of(folder) as manifest:
        runs = [run for run in manifest["runs"] if run["condition"] == BETTER]
        for run in runs[8 - failed :]:
            run |= {"status": "failed", "reason": "out of memory"}
            (folder / run["dir"] / "summary.json").unlink()
    return folder


def test_a_pair_with_a_failed_or_collapsed_run_is_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = lost_campaign(tmp_path, collapsed=1, failed=1)
    (found,) = compared(capsys, folder)["contrasts"]
    assert found["pairs"] == 6 and found["verdict"] == "improvement"
    assert f"in 6 pairs (1 failed and 1 collapsed of {BETTER} left out)" in found["explanation"]
    text = shown(capsys, folder)
    assert "among the runs that finished and did not collapse" in text
    assert f"{BETTER}_s1 collapsed (below half of the median of {BETTER})" in text
    assert (
        "Known limits: - The test assumes that runs do not collapse or fail. In simulated"
        " campaigns with equal means, it reports false improvements in" in text
    )


@pytest.mark.parametrize(("collapsed", "failed"), [(3, 0), (1, 2)])
def test_where_more_than_a_quarter_is_lost_the_word_is_undecided(
    collapsed: int, failed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = lost_campaign(tmp_path, collapsed, failed)
    found = compared(capsys, folder, "--alpha", "0.2")
    (one,) = found["contrasts"]
    assert one["pairs"] == 5 and one["p_adjusted"] < 0.2 and one["word"] == "undecided"
    assert "more than a quarter of a condition's runs failed or collapsed" in found["answer"]
    assert "fix the cause and train those runs again" in one["explanation"]


def test_a_stored_plan_keeps_its_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan of 0.9 leaves out failed runs alone, any number of them."""
    folder = lost_campaign(tmp_path, collapsed=1, failed=0)
    seeds = (1, 2, 3, 4, 5, 6, 7, 8)
    plan = AnalysisPlan(BASE, (BETTER,), "pass@1", 0.05, "seeds", seeds, 4).to_json()
    for stored, pairs in ((plan, 8), (plan | {"leaves_out": "failed and collapsed"}, 7)):
        with manifest_of(folder) as manifest:
            manifest["plan"] = stored
        (found,) = compared(capsys, folder)["contrasts"]
        assert found["pairs"] == pairs


def test_no_verdict_has_no_known_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arms = {BASE: EIGHT, BETTER: shifted([1, -1, 2, -2, 0, 1, -1, 0])}
    assert "Known limits" not in shown(capsys, write_campaign(tmp_path / "c", arms))

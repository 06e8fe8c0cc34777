"""Campaigns that are looked at after every seed: what a look decides, and that a kill changes
nothing.
"""

import errno
import json
import os
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from campaigns import manifest_of, modes_of, planned_config, problems, write_run

from retrain.analysis.compare import Comparison, compare_campaign
from retrain.analysis.comparison_text import to_text
from retrain.analysis.e_process import evidence
from retrain.analysis.explanation import computed
from retrain.analysis.planned import CampaignRecord
from retrain.analysis.status import overview
from retrain.analysis.verdict import TestSettings, Verdict
from retrain.campaign.launch import EndedJob, RunOutcome
from retrain.campaign.manifest import Manifest, Status
from retrain.campaign.plan import CampaignPlan, CampaignRun, plan_campaign, planned_seeds
from retrain.campaign.runner import _Execution
from retrain.cli.status import lines
from retrain.config import config_from_toml
from retrain.errors import ConfigurationError, Interrupted, RunFailed
from retrain.records.entries import EvaluationRecord
from retrain.report.data import ReportRequest
from retrain.report.page import write_report
from retrain.run.interrupts import Interrupts

CONDITIONS = [
    {"advantage_mode": name, "transform_mode": "none"} for name in ("grpo", "maxrl", "rloo")
]
ONCE: dict[str, Any] = {"stop": "seeds", "max_seeds": 0}
"""Tested once after all seeds."""
SECOND = frozenset({"maxrl+none_s2"})
BETTER = {
    "grpo+none": [10, 12, 9, 11, 10, 13, 10, 8, 12, 11],
    "maxrl+none": [30, 33, 31, 29, 32, 34, 31, 30, 30, 33],
}
LIKE_THE_BASELINE = {"rloo+none": [11, 10, 10, 10, 12, 11, 11, 9, 11, 12]}
THREE = {**BETTER, **LIKE_THE_BASELINE}
ASKED = 40


class Killed(BaseException):
    """What ends a campaign's process in the middle of something."""


@dataclass
class Simulated:
    """A launcher whose runs have results that a test chooses; it is killed after `until` runs."""

    right: Mapping[str, list[int]]
    failing: frozenset[str] = frozenset()
    stopping: frozenset[str] = frozenset()
    until: int = 10_000
    workers: int = 1
    identical: bool = False
    """The conditions of a seed give the same run."""
    started: list[str] = field(default_factory=list)

    def start(self, run: CampaignRun, slot: int) -> EndedJob:
        self.started.append(run.name)
        if len(self.started) > self.until:
            raise Killed
        if run.name in self.failing:
            return EndedJob(RunOutcome(Status.FAILED, "out of memory"))
        if run.name in self.stopping:
            return EndedJob(RunOutcome(Status.INTERRUPTED, "Interrupted by SIGTERM."))
        count = self.right[run.condition][run.seed - 1]
        write_run(run.folder, run.seed, held_out=answers(count), algorithm=modes_of(run.condition))
        if self.identical:
            metrics = run.folder / "metrics.jsonl"
            metrics.write_text(
                re.sub(r'"grad_norm": [\d.]+', f'"grad_norm": {run.seed}', metrics.read_text())
            )
        return EndedJob(RunOutcome(Status.DONE))

    def close(self) -> None: ...


def answers(right: int) -> list[EvaluationRecord]:
    return problems([1] * right + [0] * (ASKED - right))


class Said:
    """The lines of the board."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def started(self, name: str) -> None: ...

    def ended(self, name: str) -> None: ...


class NotInterrupted:
    stopped_by = None


def planned(folder: Path, **campaign: Any) -> CampaignPlan:
    values = {
        "seeds": [1, 2, 3],
        "max_seeds": 10,
        "stop": "evidence",
        "max_steps": 2,
        "conditions": CONDITIONS[:2],
    } | campaign
    return plan_campaign(planned_config(values, evaluation={"at_end": True}), folder)


def execute(plan: CampaignPlan, launcher: Any, interrupts: Any = NotInterrupted) -> list[str]:
    """Run the plan, from the manifest that is there; what was said."""
    folder, said = plan.folder, Said()
    if (folder / "manifest.json").exists():
        manifest = Manifest.read(folder)
        manifest.resumed_with(plan)
    else:
        folder.mkdir(parents=True)
        manifest = Manifest.of_plan(plan, datetime.now())
    _Execution(plan, manifest, launcher, said, interrupts, on_done=lambda: None).run()  # type: ignore[arg-type]
    return said.lines


def started_by(start: Callable[[CampaignRun, int], Any], workers: int = 1) -> Any:
    """A launcher."""
    return SimpleNamespace(start=start, workers=workers, notes=[])


def compared(folder: Path, **settings: float) -> Comparison:
    return compare_campaign(folder, TestSettings(**settings))


def looks(folder: Path) -> list[dict[str, Any]]:
    stored: list[dict[str, Any]] = json.loads((folder / "manifest.json").read_text())["looks"]
    return stored


def evidence_of(folder: Path) -> list[float]:
    """Of maxrl+none, after each look that says it."""
    return [look["evidence"].get("maxrl+none", 1.0) for look in looks(folder)]


def statuses(folder: Path) -> dict[str, Status]:
    return {entry.name: entry.status for entry in Manifest.read(folder).runs}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Simulated, list[str]]:
    """A campaign that a clear difference ended."""
    folder, launcher = tmp_path_factory.mktemp("stopped") / "c", Simulated(BETTER)
    return folder, launcher, execute(planned(folder), launcher)


@pytest.fixture
def decided(
    stopped: tuple[Path, Simulated, list[str]], tmp_path: Path
) -> tuple[Path, Simulated, list[str]]:
    """A copy of it."""
    shutil.copytree(stopped[0], tmp_path / "c")
    return tmp_path / "c", *stopped[1:]


def test_a_signal_is_passed_on_and_no_more_runs_start(tmp_path: Path) -> None:
    """Of real runs tests/test_campaign_runs.py has the same, which is slow."""
    interrupts, told = Interrupts(), list[int]()
    polled = iter([None, RunOutcome(Status.INTERRUPTED, "Saved.")])

    def poll() -> RunOutcome | None:
        interrupts.adopt([signal.SIGINT])
        return next(polled)

    job = SimpleNamespace(poll=poll, stop=told.append, kill=lambda: None)
    with pytest.raises(Interrupted, match="by SIGINT; continue with") as caught:
        execute(planned(tmp_path / "c"), started_by(lambda *_: job), interrupts)
    assert told == [signal.SIGINT] and caught.value.exit_code == 130
    ended = Counter(statuses(tmp_path / "c").values())
    assert ended.pop(Status.INTERRUPTED) == 1 and {*ended} == {Status.PENDING}


@pytest.mark.parametrize("last", [False, True], ids=["never", "not after the last change"])
def test_a_manifest_that_cannot_be_written_is_told_and_the_runs_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: bool
) -> None:
    """A campaign that a signal ends does not write it once more."""
    plan, launcher = planned(tmp_path / "c", **ONCE), Simulated(BETTER)

    def write(manifest: Manifest) -> None:
        done = all(entry.status is Status.DONE for entry in manifest.runs)
        if done if last else launcher.started:
            raise PermissionError(errno.EACCES, "Permission denied")
        whole(manifest)

    whole = Manifest.write
    monkeypatch.setattr(Manifest, "write", write)
    (line,) = execute(plan, launcher)
    assert len(launcher.started) == len(plan.runs)
    assert "manifest.json is not writable (Permission denied)" in line


def test_a_damaged_file_of_a_run_that_is_done_stops_no_other(tmp_path: Path) -> None:
    """Its pair is looked at as soon as both have ended."""
    plan, launcher = planned(tmp_path / "c", **ONCE), Simulated(BETTER)

    def damaging(run: CampaignRun, slot: int) -> EndedJob:
        job = launcher.start(run, slot)
        if run == plan.runs[0]:
            (run.folder / "metrics.jsonl").write_text("nonsense\n")
        return job

    execute(plan, started_by(damaging))
    assert {*statuses(plan.folder).values()} == {Status.DONE}


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EMFILE, "it does not start: Too many open files"),
        (errno.EACCES, "output.log cannot be used: this user may not read or write it"),
    ],
)
def test_a_run_that_cannot_be_started_says_why(tmp_path: Path, number: int, said: str) -> None:
    plan = planned(tmp_path / "c", seeds=[1], **ONCE)

    def start(run: CampaignRun, slot: int) -> EndedJob:
        raise OSError(number, os.strerror(number), str(run.folder / "output.log"))

    execute(plan, started_by(start))
    reasons = [entry.reason or "" for entry in Manifest.read(plan.folder).runs]
    assert all(said in reason and "free space" not in reason for reason in reasons)


def test_a_signal_that_ends_the_last_run_of_a_seed_takes_no_look(tmp_path: Path) -> None:
    """In one process the run itself takes the signal."""
    plan, baseline = planned(tmp_path / "c"), Simulated(BETTER)
    stopped = RunOutcome(Status.INTERRUPTED, "Saved.", stopped_by=signal.SIGINT)

    def start(run: CampaignRun, slot: int) -> EndedJob:
        return EndedJob(stopped) if baseline.started else baseline.start(run, slot)

    with pytest.raises(Interrupted):
        execute(plan, started_by(start), Interrupts())
    assert statuses(plan.folder)["maxrl+none_s1"] is Status.INTERRUPTED
    assert not looks(plan.folder)


def test_a_run_that_was_stopped_alone_is_left_out_of_the_look_as_a_failed_one_is(
    tmp_path: Path,
) -> None:
    """A worker that was ended by hand, or by [training] max_hours."""
    plan = planned(tmp_path / "c", max_seeds=3)
    launcher = Simulated(BETTER, stopping=SECOND)
    execute(plan, launcher)
    assert len(launcher.started) == 6
    assert [look["missing"] for look in looks(plan.folder)] == [[], ["maxrl+none"], []]
    execute(plan, again := Simulated(BETTER))
    assert again.started == ["maxrl+none_s2"]
    assert [look["seed"] for look in looks(plan.folder)] == [1, 2, 3, 2]


@pytest.mark.slow
def test_a_look_that_meets_a_damaged_file_ends_the_campaign_after_the_running_runs(
    tmp_path: Path,
) -> None:
    plan = planned(tmp_path / "c", max_seeds=6)
    with pytest.raises(Killed):
        execute(plan, Simulated(BETTER, until=3))
    damaged = tmp_path / "c" / "runs" / "grpo+none_s1" / "evaluation.jsonl"
    whole = damaged.read_text()
    damaged.write_text("{" + whole)
    launcher = Simulated(BETTER, workers=2)

    def start(run: CampaignRun, slot: int) -> Any:
        """A run that ends after as many polls as runs were started before and with it."""
        launcher.start(run, slot)
        polled = iter([None] * len(launcher.started) + [RunOutcome(Status.DONE)])
        return SimpleNamespace(poll=lambda: next(polled), kill=lambda: pytest.fail("killed"))

    with pytest.raises(RunFailed, match=r"grpo\+none_s1.*evaluation\.jsonl"):
        execute(plan, started_by(start, 2))
    assert launcher.started == ["maxrl+none_s2", "grpo+none_s3"]
    assert statuses(plan.folder)["grpo+none_s3"] is Status.DONE
    damaged.write_text(whole)
    execute(plan, Simulated(BETTER))
    assert len(looks(plan.folder)) == 6


def test_a_clear_difference_stops_the_campaign_and_the_rest_is_skipped(
    decided: tuple[Path, Simulated, list[str]],
) -> None:
    folder, launcher, said = decided
    taken = looks(folder)
    assert 6 <= len(taken) < 10 and len(launcher.started) == 2 * len(taken)
    assert [bool(look["decided"]) for look in taken] == [False] * (len(taken) - 1) + [True]
    assert taken[-1]["decided"] == {"maxrl+none": "improvement"}
    assert evidence_of(folder)[-1] >= 20
    assert statuses(folder)["maxrl+none_s10"] is Status.SKIPPED
    assert statuses(folder)["maxrl+none_s1"] is Status.DONE
    assert said[-1] == f"Decided after {len(taken)} seeds of at most 10."


def test_compare_takes_the_evidence_of_the_looks_and_says_as_planned(
    decided: tuple[Path, Simulated, list[str]],
) -> None:
    folder, _, _ = decided
    comparison = compared(folder)
    (contrast,) = comparison.contrasts
    assert contrast.conclusion.verdict is Verdict.IMPROVEMENT and comparison.to_come == 0
    found = 1 / evidence_of(folder)[-1]
    assert contrast.conclusion.p_adjusted == pytest.approx(found, rel=1e-3)
    text = to_text(comparison, 200)
    assert "Preregistered" in text and "looked at after every seed" in text and "e-process" in text
    assert "exact sign flips" not in text
    write_report(ReportRequest(folder), folder / "report.html")
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "Preregistered" in page and "looked at after every seed" in page


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"baseline": "maxrl+none"}, "baseline (maxrl+none, planned grpo+none)"),
        ({"metric": "correct_rate"}, "metric (correct_rate, planned pass@1)"),
        ({"test": TestSettings(alpha=0.01)}, "alpha (0.01, planned 0.05)"),
        ({"test": TestSettings(margin=0.1)}, "margin (0.1, none planned)"),
    ],
)
def test_another_comparison_is_exploratory(
    decided: tuple[Path, Simulated, list[str]], options: dict[str, Any], what: str
) -> None:
    comparison = compare_campaign(decided[0], options.pop("test", TestSettings()), **options)
    assert comparison.planned.startswith("Exploratory: differs from the plan")
    assert what in comparison.planned and "p is too small" in comparison.planned
    assert comparison.test.rule != "evidence"


def test_a_look_that_is_struck_shows(decided: tuple[Path, Simulated, list[str]]) -> None:
    with manifest_of(decided[0]) as content:
        del content["looks"][2]
    planned = compared(decided[0]).planned
    assert planned.startswith("Exploratory") and "its looks (at seeds 1, 2, 4, 5, 6" in planned


@pytest.mark.slow
def test_a_campaign_killed_at_any_run_decides_the_same_after_a_resume(
    decided: tuple[Path, Simulated, list[str]], tmp_path: Path
) -> None:
    whole, undisturbed, _ = decided
    for until in (1, len(undisturbed.started) // 2, len(undisturbed.started) - 1):
        plan = planned(tmp_path / f"killed-{until}")
        with pytest.raises(Killed):
            execute(plan, Simulated(BETTER, until=until))
        execute(plan, Simulated(BETTER))
        assert looks(plan.folder) == looks(whole)
        assert statuses(plan.folder) == statuses(whole)


def test_a_kill_between_a_run_and_its_look_changes_nothing(
    decided: tuple[Path, Simulated, list[str]],
) -> None:
    folder = decided[0]
    before = looks(folder)
    with manifest_of(folder) as content:
        content["looks"] = before[:-1]
    launcher = Simulated(BETTER)
    execute(planned(folder), launcher)
    assert looks(folder) == before and launcher.started == []


def test_a_decided_condition_is_dropped_and_the_others_go_on(tmp_path: Path) -> None:
    plan, launcher = planned(tmp_path / "c", conditions=CONDITIONS), Simulated(THREE)
    said = execute(plan, launcher)
    taken = looks(plan.folder)
    last = next(number for number, look in enumerate(taken, start=1) if look["decided"])
    assert last < 10 == len(taken)
    assert launcher.started.count(f"maxrl+none_s{last}") == 1
    assert f"maxrl+none_s{last + 1}" not in launcher.started
    assert "rloo+none_s10" in launcher.started
    assert said[-1] == "All 10 seeds are in. Not decided: rloo+none."
    better, like = (contrast.conclusion for contrast in compared(plan.folder).contrasts)
    assert (better.verdict, better.pairs) == (Verdict.IMPROVEMENT, last)
    assert (like.verdict, like.pairs) == (Verdict.INCONCLUSIVE, 10)


def test_a_condition_without_a_pair_stays_in_the_family_and_has_bet_nothing(tmp_path: Path) -> None:
    plan = planned(tmp_path / "c", max_seeds=4, conditions=CONDITIONS)
    everything = frozenset(run.name for run in plan.runs if run.condition == "rloo+none")
    execute(plan, Simulated(THREE, failing=everything))
    better, base = BETTER["maxrl+none"], BETTER["grpo+none"]
    differences = {seed: (better[seed] - base[seed]) / ASKED for seed in range(4)}
    found, _ = evidence([differences, {}], 4)
    assert found < evidence([differences], 4)[0]
    assert evidence_of(plan.folder)[-1] == pytest.approx(found, rel=1e-4)
    comparison = compared(plan.folder)
    (contrast,) = comparison.contrasts
    assert contrast.conclusion.p_adjusted == pytest.approx(1 / found)
    assert any("over 2 comparisons by closed testing" in line for line in computed(comparison))
    assert any("which makes 20 harder to reach" in note for note in comparison.notes)


def test_a_resume_tries_a_failed_run_again_and_looks_at_its_seed_once_more(tmp_path: Path) -> None:
    few = planned(tmp_path / "c", max_seeds=4)
    execute(few, Simulated(BETTER, failing=SECOND))
    taken = [(look["seed"], look["missing"]) for look in looks(few.folder)]
    assert taken == [(1, []), (2, ["maxrl+none"]), (3, []), (4, [])]
    before = evidence_of(few.folder)
    assert before[1] == before[0]  # nothing is bet on a missing pair
    launcher = Simulated(BETTER)
    said = execute(few, launcher)
    assert launcher.started == ["maxrl+none_s2"] and evidence_of(few.folder)[:4] == before
    assert [look["seed"] for look in looks(few.folder)] == [1, 2, 3, 4, 2]
    assert "whose failed run was tried again" in said[0]
    pairs = [*zip(BETTER["maxrl+none"], BETTER["grpo+none"], strict=True)]
    in_this_order = {
        place: (pairs[seed - 1][0] - pairs[seed - 1][1]) / ASKED
        for place, seed in enumerate((1, 3, 4, 2))
    }
    assert evidence_of(few.folder)[-1] == pytest.approx(evidence([in_this_order], 4)[0], rel=1e-4)
    (contrast,) = compared(few.folder).contrasts
    assert list(contrast.differences) == [1, 3, 4, 2]
    assert execute(few, Simulated(BETTER))[-1:] == [] and len(looks(few.folder)) == 5


def test_a_run_that_fails_again_stays_missing_and_a_decided_one_is_not_tried(
    tmp_path: Path,
) -> None:
    plan = planned(tmp_path / "c", conditions=CONDITIONS)
    failing = frozenset({"maxrl+none_s2", "rloo+none_s2"})
    execute(plan, Simulated(THREE, failing=failing))
    taken = looks(plan.folder)
    assert taken[1]["missing"] == ["maxrl+none", "rloo+none"]
    assert any("maxrl+none" in look["decided"] for look in taken)
    launcher = Simulated(THREE, failing=failing)
    execute(plan, launcher)
    assert launcher.started == ["rloo+none_s2"] and looks(plan.folder) == taken
    assert statuses(plan.folder)["maxrl+none_s2"] is Status.FAILED


@pytest.mark.slow
def test_a_campaign_whose_runs_all_failed_starts_over_at_a_resume(tmp_path: Path) -> None:
    plan = planned(tmp_path / "c")
    everything = frozenset(run.name for run in plan.runs if run.condition == "grpo+none")
    said = execute(plan, Simulated(BETTER, failing=everything))
    assert said[0] == "Look 1 (seed 1): no pair yet, since runs have no result."
    status = " ".join(lines(overview(plan.folder)))
    assert "(10 done, 10 failed)" in status and "failed (out of memory)" in status
    execute(plan, Simulated(BETTER))
    assert any(look["decided"] == {"maxrl+none": "improvement"} for look in looks(plan.folder))


def test_a_run_that_failed_and_was_tried_again_keeps_its_attempts(tmp_path: Path) -> None:
    plan = planned(tmp_path / "c", max_seeds=3)
    for failing in (SECOND, SECOND, frozenset[str]()):
        execute(plan, Simulated(BETTER, failing=failing))
    attempts = {entry.name: entry.attempts for entry in Manifest.read(plan.folder).runs}
    assert attempts.pop("maxrl+none_s2") == 3 and {*attempts.values()} == {1}
    assert "maxrl+none_s2: 3 attempts." in lines(overview(plan.folder))
    note = "Begun again after they had failed or ended: maxrl+none_s2 (3 attempts)."
    assert note in compared(plan.folder).notes


def test_a_resume_does_not_take_another_seeds_run_for_a_finished_one(tmp_path: Path) -> None:
    plan = planned(tmp_path / "c", **ONCE)
    execute(plan, Simulated(BETTER))
    two, three = (plan.folder / "runs" / f"maxrl+none_s{seed}" for seed in (2, 3))
    shutil.rmtree(two)
    shutil.copytree(three, two)
    said = lines(overview(plan.folder))
    assert "maxrl+none_s2: It holds a run of seed 3, and seed 2 is planned." in said
    launcher = Simulated(BETTER)
    execute(plan, launcher)
    assert launcher.started == ["maxrl+none_s2"]


def test_conditions_that_are_one_run_are_said_to_be_after_their_first_pair(tmp_path: Path) -> None:
    plan = planned(tmp_path / "c", **ONCE)
    said = execute(plan, Simulated(dict.fromkeys(BETTER, BETTER["grpo+none"]), identical=True))
    expected = (
        "maxrl+none_s1 is the same run as grpo+none_s1, byte for byte: what maxrl+none sets changed"
        " nothing here, or both trained on nothing."
    )
    assert [line for line in said if "byte for byte" in line] == [expected]
    text = " ".join(to_text(compared(plan.folder), 200).split())
    told = "byte for byte: what the two set differently changed nothing here, or they trained on"
    assert f"all 3 pairs are the same run, {told} nothing." in text


def test_a_kill_before_the_second_look_at_a_seed_changes_nothing(tmp_path: Path) -> None:
    whole, killed = (planned(tmp_path / name, max_seeds=5) for name in ("whole", "killed"))
    for failing in (SECOND, frozenset[str]()):
        execute(whole, Simulated(BETTER, failing=failing))
    shutil.copytree(whole.folder, killed.folder)
    with manifest_of(killed.folder) as content:
        del content["looks"][-1]
    (contrast,) = compared(killed.folder).contrasts
    assert 2 not in contrast.differences  # the run is done and not looked at yet
    notes = " ".join(compared(killed.folder).notes)
    assert "went without seed 2 of maxrl+none, whose runs are done" in notes
    execute(killed, Simulated(BETTER))
    assert looks(killed.folder) == looks(whole.folder)


def test_status_and_report_say_what_the_evidence_is_now(tmp_path: Path) -> None:
    plan = planned(tmp_path / "c")
    with pytest.raises(Killed):
        execute(plan, Simulated(BETTER, until=9))  # after four seeds; the fifth pair is incomplete
    before = (plan.folder / "manifest.json").read_bytes()
    text = to_text(compared(plan.folder))
    assert "undecided" in text and "cannot conclude" not in text
    newest = evidence_of(plan.folder)[-1]
    expected = f"Evidence after 4 seeds, of 20 needed: maxrl+none {newest:.3g}."
    assert expected in lines(overview(plan.folder))
    write_report(ReportRequest(plan.folder), tmp_path / "report.html")
    assert expected in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert (plan.folder / "manifest.json").read_bytes() == before


def test_more_workers_than_conditions_take_later_seeds_and_the_looks_stay_in_order(
    stopped: tuple[Path, Simulated, list[str]], tmp_path: Path
) -> None:
    plan = planned(tmp_path / "c")
    execute(plan, Simulated(BETTER, workers=6))
    assert looks(plan.folder) == looks(stopped[0])


def test_seeds_added_later_are_named_and_the_exact_test_is_no_longer_exact(tmp_path: Path) -> None:
    first = planned(tmp_path / "c", **ONCE, seeds=[*range(1, 7)])
    execute(first, Simulated(BETTER))
    assert "one test" in compared(first.folder).planned
    execute(planned(tmp_path / "c", **ONCE, seeds=[*range(1, 9)]), Simulated(BETTER))
    line = compared(first.folder).planned
    assert re.search(r"Added after the plan: seeds 7, 8\. .*no longer exact", line)
    assert CampaignRecord.read(first.folder).plan.seeds == (1, 2, 3, 4, 5, 6)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"max_steps": 4}, r"max_steps = 4: .* had 6 interim looks with 2. Restore that"),
        ({"conditions": CONDITIONS}, "conditions = .*rloo"),
        ({"conditions": CONDITIONS[1::-1]}, r"conditions = \["),
        ({"seeds": [3, 1, 2]}, r"seeds = \[3, 1, 2, 4, 5, 6\]: .* with \[1, 2, 3, 4, 5, 6\]"),
    ],
    ids=["steps", "another condition", "another baseline", "another order"],
)
def test_what_would_give_the_looks_another_meaning_is_refused(
    decided: tuple[Path, Simulated, list[str]], change: dict[str, Any], told: str
) -> None:
    folder = decided[0]
    with pytest.raises(ConfigurationError, match=told):
        execute(planned(folder, **change), Simulated(BETTER))


def test_a_campaign_that_was_to_be_tested_once_is_not_looked_at(tmp_path: Path) -> None:
    execute(planned(tmp_path / "c", **ONCE, seeds=[1]), Simulated(BETTER))
    with pytest.raises(ConfigurationError, match="which has one test after all of its seeds"):
        execute(planned(tmp_path / "c", seeds=[1]), Simulated(BETTER))


def test_seeds_beyond_those_named_count_on_from_the_largest() -> None:
    config = config_from_toml('[campaign]\nseeds = [42, 7]\nstop = "evidence"\nmax_seeds = 5')
    assert config.campaign and planned_seeds(config.campaign) == (42, 7, 43, 44, 45)
    with pytest.raises(ConfigurationError, match="max_seeds = 2 is below the 3 seeds of the list"):
        config_from_toml('[campaign]\nseeds = [1, 2, 3]\nstop = "evidence"\nmax_seeds = 2')

"""Find steps that trained nothing, and the cause in their records. This warns and never stops a
run, since a condition that stops itself biases a verdict.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from math import isnan

from retrain.config import TrainConfig
from retrain.records.entries import SftRecord, StepRecord
from retrain.records.terminal import counted

ENOUGH = 3
"""Number of consecutive steps without a trained row after which a run says so."""
ASKING = r"Put the final answer in \boxed{}."
ASKING_TEMPLATE = f"'{{prompt}} {ASKING}'"
"""A [data] prompt_template, as TOML, for problems that do not ask for the box that `match` and
`math` read.
"""


@dataclass
class Streak:
    """Sums, not lists, over the newest steps that trained nothing, because they may be many."""

    steps: int = 0
    completions: int = 0
    newest: StepRecord | None = None
    """The newest step that the model did not solve. This and the next two are of such steps
    alone.
    """
    sums: Counter[str] = field(default_factory=Counter)
    rewards: set[tuple[float | None, float | None]] = field(default_factory=set)
    """Mean and deviation of the rewards of a step; the set keeps at most two."""
    ends_solved: bool = False
    """True if the model solved the newest step of all."""

    @staticmethod
    def of(records: Iterable[StepRecord]) -> "Streak":
        """Return the streak at the end of a run's steps, which come oldest first."""
        return reduce(Streak.after, records, Streak())

    def after(self, record: StepRecord) -> "Streak":
        """Return the streak after the next step, which may end this one."""
        # With a KL term alone the learner trains rows, but no row for its reward.
        if 0 not in (record.num_datums, record.informative_fraction) and not is_skipped(record):
            return Streak()
        completions = (record.batch_size or 0) * (record.group_size or 0)
        self.steps += 1
        self.completions += completions
        self.ends_solved = bool(record.groups_skipped_all_correct) and not (
            record.groups_skipped_all_wrong or record.groups_skipped_other
        )
        if self.ends_solved:
            return self
        self.newest = record
        self.sums.update(unsolved=1, completions=completions)
        for name in _SUMMED:
            self.sums[name] += getattr(record, name) or 0
        for rate in _RATES:
            self.sums[rate] += round((getattr(record, rate) or 0.0) * completions)
        mean = record.mean_reward
        if len(self.rewards) < 2:
            self.rewards.add((mean and round(mean, 9), record.reward_std))
        return self


_SUMMED = (
    "batch_size",
    "num_datums",
    "groups_identical",
    "groups_skipped_all_wrong",
    "groups_skipped_all_correct",
)
_RATES = ("truncated_fraction", "answer_found_rate")
"""Recorded rates, which a streak turns into numbers of completions."""


def is_skipped(record: StepRecord | SftRecord) -> bool:
    """Return True if the learner skipped all updates of a step, since a number was not finite."""
    # A supervised step always has an update.
    return bool(getattr(record, "nonfinite_updates", True)) and (
        record.loss is None or isnan(record.loss)
    )


def is_news(streak: Streak) -> bool:
    """Return True if the newest step makes a streak long enough for a message. A streak counts its
    unsolved steps, or all its steps if the model solves every one.
    """
    unsolved = streak.sums["unsolved"]
    if not unsolved:
        return streak.steps == ENOUGH
    return unsolved == ENOUGH and not streak.ends_solved


def untrained_line(streak: Streak, config: TrainConfig, known: str = "") -> str:
    """Say how many steps of a run of `config` trained nothing, and why. If the model solves all of
    a streak, say that; "" for an empty one. `known`: the cause of only wrong answers, if the data
    show it.
    """
    if streak.newest:
        nothing = "trained nothing"
        cause = (
            "every update was skipped, since a number was not finite; look at max_abs_advantage, or"
            " lower [training] lr"
        )
        if not is_skipped(streak.newest):
            nothing = "trained on no reward" if streak.sums["num_datums"] else nothing
            cause = _cause(streak.newest, streak, config, known)
        return f"{counted(streak.sums['unsolved'], 'step')} {nothing}: {cause}."
    if streak.steps:
        return (
            f"{counted(streak.steps, 'step')} had nothing to learn: all {streak.completions:,}"
            " completions are right; use harder problems, or `retrain audit` if you expected wrong"
            " answers."
        )
    return ""


def _cause(newest: StepRecord, streak: Streak, config: TrainConfig, known: str) -> str:
    """Return the common cause of the steps and the advice, with the clearest cause first."""
    sums = streak.sums
    total, cut, groups = sums["completions"], sums["truncated_fraction"], sums["batch_size"]
    boxed, found = "", sums["answer_found_rate"]
    # Recorded where the reward reads boxes.
    if newest.answer_found_rate is not None:
        boxed = f"{found:,} of {total:,} completions hold \\boxed{{}}"
    cuts = f"{cut:,} were cut at [training] max_tokens" if cut else ""
    seen = ", ".join(filter(None, (boxed, cuts)))
    if {mean for mean, _ in streak.rewards} == {None}:
        return (
            f"none of {total:,} completions could be judged; look at reward_could_not_judge and at"
            " what the reward raises"
        )
    if config.advantages == ["none"]:
        return (
            '[algorithm] advantage_mode = "none" gives no credit; set another, or transform_mode'
            ' "distill" with a teacher other than the policy, or a plugin'
        )
    reward, deviation = next(iter(streak.rewards))
    constant = len(streak.rewards) == 1 and deviation == 0
    if constant and reward != 0:
        return _alike(total, reward)
    if known and constant:
        return f"all {total:,} completions are wrong; {known}"
    if 0 < cut == total:
        also = f" and {boxed}" if boxed else ""
        if config.environment.provider:
            also = " or the end of the model's context"
        return f"all {total:,} completions were cut at [training] max_tokens{also}; raise it"
    if 0 < sums["groups_identical"] == groups:
        return (
            "the completions of each group are the same, token by token; check that the engine"
            " draws each with noise of its own"
        )
    if boxed and not found:
        return (
            f"{seen}; unless the prompts ask for one, set [data] prompt_template ="
            f" {ASKING_TEMPLATE}; a box in a thought does not count"
        )
    return _alike(total, 0.0) if constant and not boxed else _no_difference(sums, seen)


def _no_difference(sums: Counter[str], seen: str) -> str:
    """Return the cause if no completion of a group is better than another."""
    total, groups = sums["completions"], sums["batch_size"]
    wrong, right = sums["groups_skipped_all_wrong"], sums["groups_skipped_all_correct"]
    if wrong == groups:
        shown = f" ({seen})" if seen else ""
        return (
            f"all {total:,} completions are wrong{shown}; use easier problems, larger groups or"
            " more tokens"
        )
    seen = f"({right:,} groups all right, {wrong:,} all wrong, {groups - right - wrong:,} neither)"
    solve = "use a larger [training] group_size, or problems that are sometimes solved"
    if right + wrong < groups:  # Rewards may differ in the others, and the advantages do not.
        return (
            f"every advantage is 0 {seen}; {solve}, or, if rewards differ within a group, another"
            ' advantage_mode, since "none" gives no credit'
        )
    return f"no group has completions that differ in their reward {seen}; {solve}"


def _alike(total: int, reward: float | None) -> str:
    return (
        f"all {total:,} completions have the reward {reward or 0:g}; `retrain audit` shows whether"
        " it ever gives another"
    )

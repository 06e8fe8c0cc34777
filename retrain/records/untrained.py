"""Find steps that trained nothing, and the cause in their records. This warns and never stops a
run, since a condition that stops itself biases a verdict.
"""

from collections.abc import Iterable, Sequence
from itertools import takewhile
from math import isnan

from retrain.records.entries import SftRecord, StepRecord
from retrain.records.terminal import counted

ENOUGH = 3
"""Number of consecutive steps without a trained row after which a run says so."""
ASKING = r"Put the final answer in \boxed{}."
ASKING_TEMPLATE = f"'{{prompt}} {ASKING}'"
"""A [data] prompt_template, as TOML, for problems that do not ask for the box that `match` and
`math` read.
"""


_SKIPPED = (
    "every update was skipped, since a number was not finite; look at max_abs_advantage, or lower"
    " [training] lr"
)


def untrained_streak(newest_first: Iterable[StepRecord]) -> list[StepRecord]:
    """Return the records since the last step that trained something, newest first."""
    # With a KL term alone the learner trains rows, but no row for its reward.
    return list(
        takewhile(
            lambda one: 0 in (one.num_datums, one.informative_fraction) or is_skipped(one),
            newest_first,
        )
    )


def is_skipped(record: StepRecord | SftRecord) -> bool:
    """Return True if the learner skipped all updates of a step, since a number was not finite."""
    # A supervised step always has an update.
    return bool(getattr(record, "nonfinite_updates", True)) and (
        record.loss is None or isnan(record.loss)
    )


def _is_solved(record: StepRecord) -> bool:
    """Return True if all groups of an untrained step are right."""
    return bool(record.groups_skipped_all_correct) and not (
        record.groups_skipped_all_wrong or record.groups_skipped_other
    )


def is_news(streak: Sequence[StepRecord]) -> bool:
    """Return True if the newest step makes a streak long enough for a message. A streak counts its
    unsolved steps, or all its steps if the model solves every one.
    """
    unsolved = sum(not _is_solved(record) for record in streak)
    if not unsolved:
        return len(streak) == ENOUGH
    return unsolved == ENOUGH and not _is_solved(streak[0])


def untrained_line(streak: Sequence[StepRecord], known: str = "") -> str:
    """Say how many steps of a streak trained nothing, and why. If the model solves all of them, say
    that; "" for an empty streak. `known`: the cause of only wrong answers, if the data show it.
    """
    unsolved = [record for record in streak if not _is_solved(record)]
    if unsolved and is_skipped(unsolved[0]):
        return f"{counted(len(unsolved), 'step')} trained nothing: {_SKIPPED}."
    if unsolved:
        nothing = (
            "trained on no reward"
            if any(record.num_datums for record in unsolved)
            else "trained nothing"
        )
        return f"{counted(len(unsolved), 'step')} {nothing}: {_cause(unsolved, known)}."
    if streak:
        return (
            f"{counted(len(streak), 'step')} had nothing to learn: all {_completions(streak):,}"
            " completions are right; use harder problems, or `retrain audit` if you expected wrong"
            " answers."
        )
    return ""


def _cause(records: Sequence[StepRecord], known: str) -> str:
    """Return the common cause of the records and the advice, with the clearest cause first."""
    total, cut = _completions(records), _counted(records, "truncated_fraction")
    groups = _sum(records, "batch_size")
    boxed = ""
    # Recorded where the reward reads boxes.
    if records[0].answer_found_rate is not None:
        found = _counted(records, "answer_found_rate")
        boxed = f"{found:,} of {total:,} completions hold \\boxed{{}}"
    seen = [boxed] * bool(boxed) + [f"{cut:,} were cut at [training] max_tokens"] * (cut > 0)
    means = {
        None if record.mean_reward is None else round(record.mean_reward, 9) for record in records
    }
    if means == {None}:
        return (
            f"none of {total:,} completions could be judged; look at reward_could_not_judge and at"
            " what the reward raises"
        )
    constant = len(means) == 1 and all(record.reward_std == 0 for record in records)
    if constant and means != {0.0}:
        return _alike(total, means.pop())
    if known and constant:
        return f"all {total:,} completions are wrong; {known}"
    if 0 < cut == total:
        also = f" and {boxed}" if boxed else ""
        return f"all {total:,} completions were cut at [training] max_tokens{also}; raise it"
    if 0 < _sum(records, "groups_identical") == groups:
        return (
            "the completions of each group are the same, token by token; check that the engine"
            " draws each with noise of its own"
        )
    if boxed and not found:
        return (
            f"{', '.join(seen)}; unless the prompts ask for one, set [data] prompt_template ="
            f" {ASKING_TEMPLATE}; a box in a thought does not count"
        )
    if constant and not boxed:
        return _alike(total, 0.0)
    return _no_difference(records, total, groups, ", ".join(seen))


def _no_difference(records: Sequence[StepRecord], total: int, groups: int, seen: str) -> str:
    """Return the cause if no completion of a group is better than another."""
    wrong, right = (
        _sum(records, name) for name in ("groups_skipped_all_wrong", "groups_skipped_all_correct")
    )
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
            f"every advantage is 0 {seen}; {solve}, or look at the advantage if rewards differ"
            " within a group"
        )
    return f"no group has completions that differ in their reward {seen}; {solve}"


def _alike(total: int, reward: float | None) -> str:
    return (
        f"all {total:,} completions have the reward {reward or 0:g}; `retrain audit` shows whether"
        " it ever gives another"
    )


def _completions(records: Sequence[StepRecord]) -> int:
    return sum((record.batch_size or 0) * (record.group_size or 0) for record in records)


def _counted(records: Sequence[StepRecord], rate: str) -> int:
    """Return the number of completions behind a recorded rate."""
    return sum(round((getattr(record, rate) or 0.0) * _completions([record])) for record in records)


def _sum(records: Sequence[StepRecord], name: str) -> int:
    return sum(getattr(record, name) or 0 for record in records)

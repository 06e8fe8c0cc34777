"""Write the lines of a run without a terminal: in a pipe, in a file, and in output.log."""

from collections.abc import Sequence
from pathlib import Path

from retrain.records.entries import SftRecord, StepRecord
from retrain.records.evaluation import Evaluation
from retrain.records.run_folder import RunFolder
from retrain.records.summary import RunSummary
from retrain.records.terminal import counted, number, one_line
from retrain.tracking.base import Event, GroupScore, GroupScores, Message
from retrain.types import WHOLE_MODEL, Doing

_LINE = ("loss", "reward", "correct", "datums", "bs", "gs", "sepa_l", "time")
"""The fields of a step's line."""
MAX_GROUP_LINES = 8
"""Groups of a step that the log prints one by one; it counts the outcomes of more groups."""


def lines_of(event: Event, folder: Path, *, all_groups: bool = False) -> list[str]:
    """Return the printed lines of an event; `folder` is the run's folder."""
    match event:
        case Message(line) if not isinstance(line, Doing):
            return [line]
        case GroupScores(groups):
            return group_lines(groups, all_groups=all_groups)
        case StepRecord():
            return [step_line(event)]
        case SftRecord():
            return [sft_line(event)]
        case Evaluation():
            return [evaluation_line(event), *task_lines(event)]
        case RunSummary():
            return summary_lines(event, folder)
    return []


def group_lines(groups: Sequence[GroupScore], *, all_groups: bool) -> list[str]:
    """Return a line per group. A step with more than MAX_GROUP_LINES has one line with their
    outcomes, unless `all_groups`.
    """
    if all_groups or len(groups) <= MAX_GROUP_LINES:
        return [
            f"  group: {group.correct}/{group.judged} correct | answer={one_line(group.reference)}"
            for group in groups
        ]
    right, mixed, wrong, unjudged = outcomes(groups)
    line = f"  groups: {right} all right, {mixed} mixed, {wrong} all wrong"
    return [line + (f", {unjudged} could not be judged" if unjudged else "")]


def outcomes(groups: Sequence[GroupScore]) -> tuple[int, int, int, int]:
    """Count the groups that are all right, mixed, all wrong, and without a judged completion."""
    judged = [group for group in groups if group.judged]
    right = sum(group.correct == group.judged for group in judged)
    wrong = sum(group.correct == 0 for group in judged)
    return right, len(judged) - right - wrong, wrong, len(groups) - len(judged)


def step_fields(record: StepRecord) -> dict[str, str]:
    """Return a step's numbers as text, under the names that lines and columns have."""
    groups = record.batch_size or 0
    return {
        "step": str(record.step),
        "loss": number(record.loss, ".4f"),
        "reward": number(record.mean_reward, ".3f"),
        "correct": number(record.correct_rate, ".1%"),
        "datums": number(record.num_datums, "d"),
        "bs": number(record.batch_size, "d"),
        "gs": number(record.group_size, "d"),
        "sepa_l": number(record.sepa_lambda, ".4f"),
        "time": f"{number(record.step_time_s, '.1f')}s",
        "trained": f"{round(groups * (record.informative_fraction or 0.0))}/{groups}",
        "tokens": number(record.completion_tokens_mean, ".0f"),
        "entropy": number(record.entropy_mean, ".3f"),
        "grad": number(record.grad_norm, ".3f"),
        "all right": number(record.groups_skipped_all_correct, "d"),
        "all wrong": number(record.groups_skipped_all_wrong, "d"),
    }


def step_line(record: StepRecord) -> str:
    fields = step_fields(record)
    if record.loss_is_placeholder:
        reported = number(record.reported_loss, ".4f")
        fields["loss"] = f"{reported} (asynchronous backend: placeholder)"
    values = [f"{name}={fields[name]}" for name in _LINE]
    return " | ".join([f"Step {record.step} [{record.condition}]", *values])


def sft_line(record: SftRecord) -> str:
    fields = [f"Supervised step {record.step}", f"loss={number(record.loss, '.4f')}"]
    if record.heldout_logprob is not None:
        fields.append(f"heldout_logprob={record.heldout_logprob:.4f}")
    fields += [f"lr={record.lr:.3g}", f"tokens={record.learned_tokens}/{record.tokens}"]
    return " | ".join([*fields, f"time={record.step_time_s:.1f}s"])


def evaluation_fields(result: Evaluation) -> list[str]:
    samples = sum(problem.samples for problem in result.problems)
    skipped = sum(problem.could_not_judge for problem in result.problems)
    fields = [f"Evaluation at {_at(result)}", pass_at_1(result)]
    fields += [
        f"pass@{k}={value:.1%} {_ends(result.interval_at(k))}"
        for k, value in sorted(result.pass_at.items())
        if k != 1
    ]
    fields += [f"problems={len(result.problems)}", f"samples={samples}"]
    fields += [f"could_not_judge={skipped}"] if skipped else []
    return [*fields, f"time={result.seconds:.1f}s"]


def evaluation_line(result: Evaluation) -> str:
    return " | ".join(evaluation_fields(result))


def pass_at_1(result: Evaluation) -> str:
    return f"pass@1={number(result.pass_at.get(1), '.1%')} {_ends(result.interval)}"


def task_lines(result: Evaluation) -> list[str]:
    """Return lines with the pass@1 of each task and its interval; empty for a single task."""
    tasks = result.by_task
    if len(tasks) < 2:
        return []
    return [
        f"  {task} | {pass_at_1(part)} | problems={len(part.problems)}"
        for task, part in tasks.items()
    ]


def _at(result: Evaluation) -> str:
    return f"{'supervised ' if result.stage == 'sft' else ''}step {result.step}"


def _ends(interval: tuple[float, float]) -> str:
    return f"[{interval[0]:.1%}, {interval[1]:.1%}]"


def summary_lines(summary: RunSummary, folder: Path) -> list[str]:
    lines = [
        (
            f"Run {summary.status}: {counted(summary.steps, 'step')}, {summary.tokens:,} tokens,"
            f" {summary.seconds:.1f}s of steps and evaluations; this session took"
            f" {summary.wall_s:.1f}s."
        )
    ]
    lines += [summary.untrained] if summary.untrained else []
    # Standard error has the reason.
    if summary.status != "done":
        return [
            *lines,
            f"Run folder: {folder} | continue with `{RunFolder(folder).resume_command}`",
        ]
    if (
        summary.before is not None
        and summary.after is not None
        and _at(summary.before) != _at(summary.after)
    ):
        before, after = summary.before, summary.after
        gain = ""
        found = after.difference_from(before)
        if found is not None:
            mean, (low, high) = found
            gain = (
                f": {100 * mean:+.1f} pp [{100 * low:+.1f}, {100 * high:+.1f}], paired by problem"
            )
        lines.append(f"Held-out {pass_at_1(before)} at {_at(before)} -> {pass_at_1(after)}{gain}.")
    elif summary.after is not None:
        lines.append(f"Held-out {pass_at_1(summary.after)}.")
    trained = folder / summary.adapter
    what = "model" if (trained / WHOLE_MODEL).is_file() else "adapter"
    return [*lines, f"Run folder: {folder} | {what}: {trained}"]

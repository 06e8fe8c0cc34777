"""Write a comparison for its readers: aligned text for a terminal, Markdown, and one JSON object
with stable keys.

The texts begin with the answer. The conditions, every seed, the contrasts, the limits of the
verdicts, and the computation follow.
"""

import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass

from retrain.analysis.compare import ArmSummary, Comparison, Contrast
from retrain.analysis.explanation import (
    computed,
    explanation,
    known_limits,
    looks_taken,
    remarks,
    sharing,
)
from retrain.analysis.headline import answer, name_of, p_words
from retrain.analysis.measures import Metric, difference_words, interval_words, size_words
from retrain.records.terminal import GAP, filled_columns, markdown_lines, picked, table_lines
from retrain.system import Json

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""(head, rows)"""

_HIDDEN = ("for new problems", "p", "effect size d_z")
"""Columns of `contrast_table` that a terminal has no room for; the sentences have them."""
_PARTS = ("eval sd", "seed sd")
"""Columns for which a narrow terminal has no room."""


@dataclass(frozen=True)
class Block:
    """A table or sentences, under a title or without one."""

    sentences: Sequence[str] = ()
    title: str = ""
    table: Table | None = None


def blocks(comparison: Comparison, contrasts: Table) -> Iterator[Block]:
    """Yield the answer first. The columns of `contrast_table` that `contrasts` leaves out follow as
    sentences.
    """
    yield Block([answer(comparison)])
    if comparison.planned:
        yield Block([comparison.planned])
    yield Block(table=arm_table(comparison))
    yield Block([seed_line(contrast, comparison) for contrast in comparison.contrasts])
    yield Block(table=contrasts)
    head, rows = contrast_table(comparison)
    own, shared = remarks(comparison)
    for contrast, said, row in zip(comparison.contrasts, own, rows, strict=True):
        hidden = {
            name: cell
            for name, cell in zip(head, row, strict=True)
            if name not in contrasts[0] and cell
        }
        wide = hidden.pop("for new problems", "")
        level = 100 * (1 - comparison.test.alpha)
        also = f"If other problems had been drawn: {wide} ({level:g}%). " * bool(wide)
        if hidden:
            said.append(f"{also}{', '.join(map(' '.join, hidden.items()))}.")
        yield Block(said, name_of(contrast, comparison))
    if shared:
        yield Block(shared, "All of these")
    if any(arm.tasks for arm in comparison.arms):
        yield Block(title=_task_title(comparison), table=task_table(comparison))
    for title, sentences in sections(comparison):
        yield Block(sentences, title)


def to_markdown(comparison: Comparison) -> str:
    lines = []
    for block in blocks(comparison, contrast_table(comparison)):
        if block.title:
            lines += [f"**{block.title}**", ""]
        if block.table:
            lines += markdown_lines(*block.table)
        lines += [f"- {sentence}" if block.title else sentence for sentence in block.sentences]
        lines.append("")
    return "\n".join(lines)


def to_text(comparison: Comparison, width: int = 80) -> str:
    """Return lines of at most `width` columns, unless a single word or table cell is longer."""
    lines: list[str] = []
    for block in blocks(comparison, narrowed(contrast_table(comparison), width)):
        if lines:
            lines.append("")
        if block.title:
            lines += _wrapped(f"{block.title}:", width)
        if block.table:
            lines += _aligned(block.table, width)
        start = "- " * bool(block.title)
        for sentence in block.sentences:
            lines += _wrapped(start + sentence, width)
    return "\n".join(lines) + "\n"


def narrowed(table: Table, width: int) -> Table:
    """Return the columns of `contrast_table` that a terminal has room for."""
    head, rows = narrow = _without(table, _HIDDEN)
    if max(map(len, table_lines([head[1:], *(row[1:] for row in rows)]))) > width - 2:
        return _without(narrow, _PARTS)
    return narrow


def _without(table: Table, names: Collection[str]) -> Table:
    shown = [column for column, name in enumerate(table[0]) if name not in names]
    head, *rows = (picked(row, shown) for row in (table[0], *table[1]))
    return head, rows


def sections(comparison: Comparison) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the title and sentences of each section that follows the verdicts."""
    shared = list(dict.fromkeys(sharing(contrast) for contrast in comparison.contrasts))
    together = shared
    if len(shared) > 1:
        together = [
            f"{name_of(contrast, comparison)}: {sharing(contrast)}"
            for contrast in comparison.contrasts
        ]
    found = {
        "Ranking": list(ranking(comparison)),
        "Known limits": list(known_limits(comparison)),
        "Notes": comparison.notes,
        "Looks": list(looks_taken(comparison)),
        "How it was computed": list(computed(comparison)),
        "What the runs of a pair had in common": together,
        "Left out": comparison.left_out,
    }
    for title, sentences in found.items():
        if sentences:
            yield title, sentences


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def _aligned(table: Table, width: int) -> Iterator[str]:
    """Align labels and the last column to the left, numbers to the right. A table wider than the
    terminal has each label on a line of its own.
    """
    rows = [table[0], *table[1]]
    numbers = range(1, len(table[0]) - 1)
    lines = list(table_lines(rows, right=numbers))
    if max(map(len, lines)) <= width:
        yield from lines
        return
    for row, cells in zip(
        rows,
        table_lines(
            [row[1:] for row in rows], right=[column - 1 for column in numbers], indent=GAP
        ),
        strict=True,
    ):
        yield row[0]
        yield cells


def _task_title(comparison: Comparison) -> str:
    confidence = f"{100 * (1 - comparison.test.alpha):g}%"
    return f"Over tasks (interquartile mean of runs x tasks, {confidence} interval for new runs)"


# -- tables ----------------------------------------------------------------------------------------


def seed_line(contrast: Contrast, comparison: Comparison) -> str:
    """Return every seed's difference, and the difference that speaks most against the mean."""
    metric, found = comparison.metric, contrast.differences
    unit = " pp" if metric.is_rate else ""
    values = " ".join(
        difference_words(value, metric).removesuffix(" pp") for value in found.values()
    )
    if len(found) == 1:
        return f"{name_of(contrast, comparison)}, seed {next(iter(found))}: {values}{unit}"
    upwards = contrast.conclusion.mean >= 0
    seed = (min if upwards else max)(found, key=lambda seed: found[seed])
    end = f"{'smallest' if upwards else 'largest'} {difference_words(found[seed], metric)}"
    return (
        f"{name_of(contrast, comparison)}, seeds {' '.join(map(str, found))}: {values}{unit}; {end}"
        f" (seed {seed})"
    )


def arm_table(comparison: Comparison) -> Table:
    failed = any(arm.failed for arm in comparison.arms)
    collapsed = any(arm.collapsed for arm in comparison.arms)
    unjudged = any(arm.unjudged for arm in comparison.arms)
    minutes = all((arm.hours or 0) < 1 for arm in comparison.arms)

    def row(arm: ArmSummary) -> tuple[str, ...]:
        done = str(arm.runs)
        if failed:
            done += f" / {arm.failed}"
        if collapsed:
            done += f" / {arm.collapsed}"
        missing = f"{arm.unjudged:,} of {arm.answered:,}" if unjudged else ""
        tokens = "" if arm.tokens is None else f"{arm.tokens:,.0f}"
        return (
            arm.label,
            done,
            _mean_words(arm, comparison.metric),
            size_words(arm.sd, comparison.metric),
            missing,
            tokens,
            "" if arm.hours is None else f"{arm.hours * (60 if minutes else 1):.2g}",
        )

    # A budget cuts the runs, but not their cost.
    run = "whole run" if comparison.budget else "run"
    head = (
        "condition",
        " / ".join(["done", *["failed"] * failed, *["collapsed"] * collapsed])
        if failed or collapsed
        else "runs",
        "mean",
        "sd between runs",
        "unjudged",
        f"tokens per {run}",
        f"{'minutes' if minutes else 'hours'} per {run}",
    )
    rows = [row(arm) for arm in comparison.arms]
    kept = filled_columns(rows)
    return picked(head, kept), [picked(cells, kept) for cells in rows]


def _mean_words(arm: ArmSummary, metric: Metric) -> str:
    if arm.mean is None:
        return ""
    if metric.is_rate:
        return f"{100 * arm.mean:.1f}%"
    return f"{arm.mean:.4g}"


def ranked(comparison: Comparison) -> list[ArmSummary]:
    """Return the conditions of a grid from the best mean to the worst; empty without a grid."""
    measured = [arm for arm in comparison.arms if arm.mean is not None and comparison.grid]
    lower = comparison.test.direction(comparison.metric.better) == "lower"
    return sorted(measured, key=lambda arm: arm.mean or 0.0, reverse=not lower)


def ranking(comparison: Comparison) -> Iterator[str]:
    """Write the order of a grid's conditions, and say that no test supports the order."""
    order = ranked(comparison)
    if len(order) < 2:
        return
    means = [arm.mean for arm in order]
    for arm in order:  # Equal means share a place.
        place = 1 + means.index(arm.mean)
        yield f"{place}. {arm.label} {_mean_words(arm, comparison.metric)}"
    best, other = order[0].label, comparison.baseline
    if best == other:
        other = order[1].label
    first = f"the best of {len(order)} means is"
    if means.count(means[0]) > 1:
        first = f"{means.count(means[0])} of {len(order)} share the first place, which is"
    yield (
        f"This is a selection, not a test: {first} partly chance, so its own mean is biased"
        f" upwards. Confirm {best} against {other} as the two [[campaign.conditions]] of a new"
        " campaign, on seeds that this one did not use."
    )


def contrast_table(comparison: Comparison) -> Table:
    """Return one row per contrast, the verdict last."""
    columns = dict(_contrast_columns(comparison))
    rows = [[cell(contrast) for cell in columns.values()] for contrast in comparison.contrasts]
    return list(columns), rows


def _sd_words(variance: float | None, metric: Metric) -> str:
    if variance is None:
        return ""
    return size_words(variance**0.5, metric)


def _contrast_columns(
    comparison: Comparison,
) -> Iterator[tuple[str, Callable[[Contrast], str]]]:
    """Yield head and cell of each column that some contrast fills."""
    metric, test, contrasts = comparison.metric, comparison.test, comparison.contrasts
    label = "condition" if comparison.one_baseline else "contrast"
    yield label, lambda one: name_of(one, comparison)
    yield "pairs", lambda one: str(one.conclusion.pairs)
    yield "difference", lambda one: difference_words(one.conclusion.mean, metric)
    yield (
        f"{100 * (1 - test.alpha):g}% interval",
        lambda one: interval_words(one.conclusion.interval, metric),
    )
    if any(one.wide for one in contrasts):
        yield (
            "for new problems",
            lambda one: interval_words(one.wide, metric),
        )
    if any(one.parts for one in contrasts):
        yield (
            "eval sd",
            lambda one: _sd_words(one.parts.noise_variance if one.parts else None, metric),
        )
        yield (
            "seed sd",
            lambda one: _sd_words(one.parts.luck_variance if one.parts else None, metric),
        )
    yield "p", lambda one: p_words(one.conclusion.p)
    yield "adjusted p", lambda one: p_words(one.conclusion.p_adjusted)
    if test.margin is not None:
        yield "p (TOST)", lambda one: p_words(one.conclusion.equivalence_p_adjusted)
    yield (
        "effect size d_z",
        lambda one: "" if one.conclusion.d_z is None else f"{one.conclusion.d_z:.2f}",
    )
    yield "verdict", lambda one: one.conclusion.word(test.alpha)


def task_table(comparison: Comparison) -> Table:
    """Return one row per arm whose held-out problems come from several tasks."""
    metric = comparison.metric
    # The last two columns are about the baseline, and a contrast of --contrast may have another.
    contrasts = {
        contrast.condition: contrast.tasks
        for contrast in comparison.contrasts
        if contrast.baseline == comparison.baseline
    }
    rows = []
    for arm in comparison.arms:
        if arm.tasks:
            ends = ""
            if arm.tasks.interval:
                ends = f" ({100 * arm.tasks.interval[0]:.1f} to {100 * arm.tasks.interval[1]:.1f})"
            difference = chance = ""
            against = contrasts.get(arm.label)
            if against:
                difference = (
                    f"{difference_words(against.iqm_difference, metric)}"
                    f" ({interval_words(against.interval, metric)})"
                )
                chance = f"{100 * against.probability_of_improvement:.0f}%"
            rows.append(
                (
                    arm.label,
                    str(len(arm.tasks.tasks)),
                    f"{100 * arm.tasks.iqm:.1f}%{ends}",
                    difference,
                    chance,
                )
            )
    return ("condition", "tasks", "IQM", "difference", "a run beats the baseline's"), rows


# -- as data ---------------------------------------------------------------------------------------


def to_json(comparison: Comparison) -> Json:
    """Return the comparison as JSON values, differences and means in the metric's own units; absent
    values are null.
    """
    test = comparison.test
    at = {}
    if comparison.budget:
        at = {"at": {"tokens": comparison.budget.tokens}}
    return at | {
        "answer": answer(comparison),
        "metric": comparison.metric.name,
        "metric_description": comparison.metric.description,
        "better": test.direction(comparison.metric.better),
        "judge": comparison.judge or None,
        "evaluated": comparison.evaluated or None,
        "problems": comparison.problems or None,
        "lower_is_better": test.lower_is_better,
        "baseline": comparison.baseline,
        "alpha": test.alpha,
        "margin": test.margin,
        "effect": test.effect,
        "power": test.power,
        "correction": test.rule,
        "planned": comparison.planned or None,
        "looks": [look.to_json() for look in comparison.looks] or None,
        "seeds_to_conclude": comparison.seeds_to_conclude,
        "to_come": comparison.to_come,
        "arms": [
            asdict(arm)
            | {
                "condition": arm.label,
                "tasks": arm.tasks
                and {
                    "scores": dict(arm.tasks.tasks),
                    "iqm": arm.tasks.iqm,
                    "interval": arm.tasks.interval,
                },
            }
            for arm in comparison.arms
        ],
        "ranking": [arm.label for arm in ranked(comparison)] or None,
        "contrasts": [_contrast_json(contrast, comparison) for contrast in comparison.contrasts],
        "known_limits": list(known_limits(comparison)),
        "notes": list(comparison.notes),
        "left_out": list(comparison.left_out),
    }


def _contrast_json(contrast: Contrast, comparison: Comparison) -> Json:
    found, shared, alpha = contrast.conclusion, contrast.shared, comparison.test.alpha
    return {
        "condition": contrast.condition,
        "baseline": contrast.baseline,
        "verdict": found.verdict.value,
        "word": found.word(alpha),
        "explanation": " ".join(explanation(contrast, comparison)),
        "pairs": found.pairs,
        "differences": {str(seed): value for seed, value in contrast.differences.items()},
        "mean_difference": found.mean,
        "sd": found.sd,
        "interval": found.interval,
        "problem_interval": contrast.wide,
        "unjudged_bounds": found.bounds,
        "p": found.p,
        "p_adjusted": found.p_adjusted,
        "smallest_p_adjusted": found.smallest_p_adjusted,
        "can_conclude": found.can_conclude(alpha),
        "d_z": found.d_z,
        "detectable": found.detectable,
        "seeds_needed": found.seeds_needed,
        "equivalence_p_adjusted": found.equivalence_p_adjusted,
        "within_margin": found.within_margin,
        "same_runs": contrast.same_runs,
        "losses": asdict(contrast.losses) if contrast.losses else None,
        "pairing": asdict(contrast.pairing) if contrast.pairing else None,
        "noise_sd": contrast.parts.noise_variance**0.5 if contrast.parts else None,
        "luck_sd": contrast.parts.luck_variance**0.5 if contrast.parts else None,
        "same_prompts": shared.prompts,
        "shared_noise": shared.noise,
        "differing_keys": list(shared.differing_keys),
        "differing_environment": list(shared.environment),
        "tasks": asdict(contrast.tasks) if contrast.tasks else None,
    }

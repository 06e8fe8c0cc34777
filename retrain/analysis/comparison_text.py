"""A comparison for its readers: aligned text for a terminal, Markdown, and one JSON object with stable keys."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from retrain.analysis.compare import ArmSummary, Comparison, Contrast
from retrain.analysis.measures import Metric
from retrain.analysis.tasks import PROFILE_THRESHOLDS, TaskAggregate
from retrain.analysis.verdict import Conclusion, Verdict
from retrain.records.printing import GAP, counted, markdown_lines, table_lines

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""(head, rows)"""

_ENOUGH_RUNS = 10
"""From here on percentile intervals of resampled runs have about their nominal coverage (Colas et al., arXiv 1806.08295)."""
_SHOWN = (0, 1, 2, 3, 5, 8)
"""Columns of `contrast_table` on a terminal: condition, pairs, difference, interval, adjusted p, verdict. The sentences have the others."""


def to_markdown(comparison: Comparison) -> str:
    return "\n".join(_markdown(comparison)) + "\n"


def _markdown(comparison: Comparison) -> Iterator[str]:
    yield f"# Conditions against {comparison.baseline}"
    yield ""
    yield heading(comparison)
    yield ""
    yield from markdown_lines(*arm_table(comparison))
    yield ""
    head, rows = contrast_table(comparison)
    yield from markdown_lines(head, [(*cells, f"**{verdict}**") for *cells, verdict in rows])
    yield ""
    shared = {sharing(contrast) for contrast in comparison.contrasts}
    if len(shared) == 1:
        yield from (*shared, "")
    for contrast in comparison.contrasts:
        yield f"- **{contrast.condition}**: {explanation(contrast, comparison)}"
        if len(shared) > 1:
            yield f"  {sharing(contrast)}"
        yield from (f"  {line}" for line in details(contrast, comparison))
    if any(arm.tasks for arm in comparison.arms):
        yield ""
        yield task_heading(comparison)
        yield ""
        yield from markdown_lines(*task_table(comparison))
    for title, sentences in (("Notes", comparison.notes), ("Left out", comparison.left_out)):
        if sentences:
            yield ""
            yield f"{title}:"
            yield from (f"- {sentence}" for sentence in sentences)


def to_text(comparison: Comparison, width: int = 80) -> str:
    """Lines of at most `width` columns, unless a single word or table cell is longer."""
    return "\n".join(_text(comparison, width)) + "\n"


def _text(comparison: Comparison, width: int) -> Iterator[str]:
    yield f"Conditions against {comparison.baseline}"
    yield from _wrapped(heading(comparison), width, after="")
    yield ""
    yield from _aligned(arm_table(comparison), width)
    yield ""
    head, rows = contrast_table(comparison)
    yield from _aligned(([head[column] for column in _SHOWN], [[row[column] for column in _SHOWN] for row in rows]), width)
    yield ""
    shared = {sharing(contrast) for contrast in comparison.contrasts}
    if len(shared) == 1:
        yield from _wrapped(next(iter(shared)), width, after="")
    for contrast, row in zip(comparison.contrasts, rows, strict=True):
        yield from _wrapped(f"{contrast.condition}: {explanation(contrast, comparison)}", width)
        hidden = [f"{head[column]} {cell}" for column, cell in enumerate(row) if column not in _SHOWN and cell]
        said = [*([sharing(contrast)] if len(shared) > 1 else []), f"Also: {', '.join(hidden)}.", *details(contrast, comparison)]
        yield from (line for sentence in said for line in _wrapped(sentence, width, "  "))
    if any(arm.tasks for arm in comparison.arms):
        yield ""
        yield from _wrapped(task_heading(comparison), width, after="")
        yield from _aligned(task_table(comparison), width)
    for title, sentences in (("Notes", comparison.notes), ("Left out", comparison.left_out)):
        if sentences:
            yield from ("", f"{title}:")
            for sentence in sentences:
                yield from _wrapped(f"- {sentence}", width)


def _wrapped(text: str, width: int, indent: str = "", after: str = "  ") -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent + after, break_long_words=False, break_on_hyphens=False
    )


def _aligned(table: Table, width: int) -> Iterator[str]:
    """Labels and the last column to the left, numbers to the right. A table wider than the terminal has each label on a line of its own."""
    rows = [table[0], *table[1]]
    numbers = range(1, len(table[0]) - 1)
    lines = list(table_lines(rows, right=numbers))
    if max(map(len, lines)) <= width:
        yield from lines
        return
    for row, cells in zip(rows, table_lines([row[1:] for row in rows], right=[column - 1 for column in numbers], indent=GAP), strict=True):
        yield row[0]
        yield cells


# -- sentences -----------------------------------------------------------------------------------------------------------


def heading(comparison: Comparison) -> str:
    """What is compared, by whose judgement, and how."""
    words = comparison.metric.description
    judge = f", judged by {comparison.judge}" if comparison.judge else ""
    direction = "lower" if comparison.test.lower_is_better else "higher"
    return f"{words[0].upper()}{words[1:]}{judge}; {direction} is better. The unit is the run; runs are paired by seed."


def explanation(contrast: Contrast, comparison: Comparison) -> str:
    """What may be concluded from one contrast, and what may not."""
    metric, test, found = comparison.metric, comparison.test, contrast.conclusion
    shown = f"{_difference(found.mean, metric)} in {counted(found.pairs, 'pair')}"
    match found.verdict:
        case Verdict.IMPROVEMENT | Verdict.WORSE:
            return f"{found.verdict}: {shown}, adjusted p {_p(found.p_adjusted)}."
        case Verdict.EQUIVALENT:
            return f"equivalent within {_size(test.margin, metric)}: {shown}, adjusted p {_p(found.equivalence_p_adjusted)} (TOST)."
        case Verdict.INCONCLUSIVE:
            return f"inconclusive: {shown}. {_why_inconclusive(found, comparison)}"


def _why_inconclusive(found: Conclusion, comparison: Comparison) -> str:
    metric, test = comparison.metric, comparison.test
    pairs, family = counted(found.pairs, "pair"), counted(len(comparison.contrasts), "comparison")
    if not found.can_conclude(test.alpha):
        return (
            f"No result of {pairs} could be significant: the smallest possible adjusted p is {_p(found.smallest_p_adjusted)}; "
            f"at least {comparison.seeds_to_conclude} seeds are needed for {family} at {test.alpha:g}."
        )
    if not found.sd:
        return "All differences are equal, so they show nothing about chance."
    if found.minimal_detectable_effect is None:
        return f"With only {pairs}, this contrast can be significant only after another one is."
    interval_alone = ""
    if found.interval and not found.interval[0] <= 0 <= found.interval[1]:
        p = f"adjusted p over {family}" if len(comparison.contrasts) > 1 else "p"
        interval_alone = f"Its own interval excludes 0, but the {p}, {_p(found.p_adjusted)}, is not below {test.alpha:g}. "
    detectable = _size(found.minimal_detectable_effect, metric)
    return (
        f"{interval_alone}A true difference of {detectable} would be found in {100 * test.power:g}% of such campaigns, "
        "a smaller one less often."
    )


def details(contrast: Contrast, comparison: Comparison) -> Iterator[str]:
    """What else there is to say about a contrast, one sentence each."""
    metric, test, found = comparison.metric, comparison.test, contrast.conclusion
    if contrast.problem_interval:
        yield f"For new problems and samples as well: {_interval(contrast.problem_interval, metric)}."
    if found.seeds_needed is not None:
        yield (
            f"To find {_size(test.effect, metric)} with a power of {100 * test.power:g}%, {found.seeds_needed} seeds are needed "
            f"at the sd of the differences seen here ({_size(found.sd, metric)})."
        )
    if contrast.differing_keys:
        yield f"The arms differ in {', '.join(contrast.differing_keys)}."
    else:
        yield "The arms differ in no key: an A/A comparison."


def sharing(contrast: Contrast) -> str:
    """What the runs of a pair had in common; the more they share, the less luck is in their difference."""
    shared = contrast.shared
    if shared.noise == shared.prompts == shared.pairs:
        return "The arms of every pair saw the same prompts and shared their sampling noise."
    prompts, noise = (
        "no" if count == 0 else "all" if count == shared.pairs else f"{count} of {shared.pairs}" for count in (shared.prompts, shared.noise)
    )
    return f"Same prompts in {prompts} pairs, shared sampling noise in {noise}."


def task_heading(comparison: Comparison) -> str:
    few = min(arm.runs for arm in comparison.arms if arm.tasks) < _ENOUGH_RUNS
    caution = f", too narrow below about {_ENOUGH_RUNS} runs" if few else ""
    confidence = f"{100 * (1 - comparison.test.alpha):g}%"
    return f"Over tasks (interquartile mean of runs x tasks, {confidence} interval from runs resampled within tasks{caution}):"


# -- tables --------------------------------------------------------------------------------------------------------------


def arm_table(comparison: Comparison) -> Table:
    def row(arm: ArmSummary) -> tuple[str, ...]:
        mean = "" if arm.mean is None else f"{100 * arm.mean:.1f}%" if comparison.metric.is_rate else f"{arm.mean:.4g}"
        return arm.label, str(arm.runs), mean, _size(arm.sd, comparison.metric)

    return ("condition", "runs", "mean", "sd between runs"), [row(arm) for arm in comparison.arms]


def contrast_table(comparison: Comparison) -> Table:
    """One row per contrast, the verdict last."""
    metric, test = comparison.metric, comparison.test
    confidence, detectable = f"{100 * (1 - test.alpha):g}% interval", f"detectable ({100 * test.power:g}%)"
    rows = []
    for contrast in comparison.contrasts:
        found = contrast.conclusion
        rows.append(
            (
                contrast.condition,
                str(found.pairs),
                _difference(found.mean, metric),
                _interval(found.interval, metric) if found.interval else "",
                _p(found.p),
                _p(found.p_adjusted),
                "" if found.d_z is None else f"{found.d_z:.2f}",
                _size(found.minimal_detectable_effect, metric) if found.can_conclude(test.alpha) else "none",
                str(found.verdict),
            )
        )
    return ("condition", "pairs", "difference", confidence, "p", "adjusted p", "d_z", detectable, "verdict"), rows


def task_table(comparison: Comparison) -> Table:
    """One row per arm whose held-out problems come from several tasks."""
    metric = comparison.metric
    contrasts = {contrast.condition: contrast.tasks for contrast in comparison.contrasts}
    rows = []
    for arm in comparison.arms:
        if arm.tasks:
            low, high = arm.tasks.interval
            shown = f"{100 * arm.tasks.iqm:.1f}% ({100 * low:.1f} to {100 * high:.1f})"
            difference = chance = ""
            if against := contrasts.get(arm.label):
                difference = f"{_difference(against.iqm_difference, metric)} ({_interval(against.interval, metric)})"
                chance = f"{100 * against.probability_of_improvement:.0f}%"
            rows.append((arm.label, str(len(arm.tasks.tasks)), shown, difference, chance))
    return ("condition", "tasks", "IQM", "difference", "a run beats the baseline's"), rows


def _difference(value: float, metric: Metric) -> str:
    return f"{100 * value:+.1f} pp" if metric.is_rate else f"{value:+.4g}"


def _size(value: float | None, metric: Metric) -> str:
    if value is None:
        return ""
    return f"{100 * value:.1f} pp" if metric.is_rate else f"{value:.4g}"


def _interval(interval: tuple[float, float], metric: Metric) -> str:
    low, high = interval
    return f"{100 * low:+.1f} to {100 * high:+.1f} pp" if metric.is_rate else f"{low:+.4g} to {high:+.4g}"


def _p(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2g}" if value < 0.995 else "1"


# -- as data -------------------------------------------------------------------------------------------------------------


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Differences and means in the metric's own units; what does not exist is null."""
    test = comparison.test
    return {
        "metric": comparison.metric.name,
        "metric_description": comparison.metric.description,
        "judge": comparison.judge or None,
        "lower_is_better": test.lower_is_better,
        "baseline": comparison.baseline,
        "alpha": test.alpha,
        "margin": test.margin,
        "effect": test.effect,
        "power": test.power,
        "seeds_to_conclude": comparison.seeds_to_conclude,
        "arms": [
            {"condition": arm.label, "runs": arm.runs, "mean": arm.mean, "sd": arm.sd, "tasks": _tasks_json(arm.tasks)}
            for arm in comparison.arms
        ],
        "contrasts": [_contrast_json(contrast, comparison) for contrast in comparison.contrasts],
        "notes": list(comparison.notes),
        "left_out": list(comparison.left_out),
    }


def _contrast_json(contrast: Contrast, comparison: Comparison) -> dict[str, Any]:
    found, shared, tasks = contrast.conclusion, contrast.shared, contrast.tasks
    return {
        "condition": contrast.condition,
        "verdict": found.verdict.value,
        "explanation": explanation(contrast, comparison),
        "pairs": found.pairs,
        "differences": {str(seed): value for seed, value in contrast.differences.items()},
        "mean_difference": found.mean,
        "sd": found.sd,
        "interval": found.interval,
        "problem_interval": contrast.problem_interval,
        "p": found.p,
        "p_adjusted": found.p_adjusted,
        "smallest_p_adjusted": found.smallest_p_adjusted,
        "can_conclude": found.can_conclude(comparison.test.alpha),
        "d_z": found.d_z,
        "minimal_detectable_effect": found.minimal_detectable_effect,
        "seeds_needed": found.seeds_needed,
        "equivalence_p_adjusted": found.equivalence_p_adjusted,
        "same_prompts": shared.prompts,
        "shared_noise": shared.noise,
        "differing_keys": list(contrast.differing_keys),
        "tasks": asdict(tasks) if tasks else None,
    }


def _tasks_json(tasks: TaskAggregate | None) -> dict[str, Any] | None:
    if tasks is None:
        return None
    profile = dict(zip((f"{threshold:g}" for threshold in PROFILE_THRESHOLDS), tasks.profile, strict=True))
    return {"scores": dict(tasks.tasks), "iqm": tasks.iqm, "interval": tasks.interval, "performance_profile": profile}

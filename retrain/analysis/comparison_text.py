"""A comparison in words and numbers: the sentences and tables of every form of it, Markdown, and one JSON object with stable keys."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from retrain.analysis.compare import ArmSummary, Comparison, Contrast
from retrain.analysis.measures import Metric
from retrain.analysis.tasks import PROFILE_THRESHOLDS, TaskAggregate
from retrain.analysis.verdict import Conclusion, Verdict

_ENOUGH_RUNS = 10
"""From here on percentiles of resampled runs cover about what they say (Colas et al., arXiv 1806.08295)."""


def to_markdown(comparison: Comparison) -> str:
    return "\n".join(_paragraphs(comparison)) + "\n"


def _paragraphs(comparison: Comparison) -> Iterator[str]:
    yield f"# Conditions against {comparison.baseline}"
    yield ""
    yield heading(comparison)
    yield ""
    yield from _table(*arm_table(comparison))
    yield ""
    head, rows = contrast_table(comparison)
    yield from _table(head, [(*cells, f"**{verdict}**") for *cells, verdict in rows])
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
        yield task_words(comparison)
        yield ""
        yield from _table(*task_table(comparison))
    for title, sentences in (("Notes", comparison.notes), ("Left out", comparison.left_out)):
        if sentences:
            yield ""
            yield f"{title}:"
            yield from (f"- {sentence}" for sentence in sentences)


def heading(comparison: Comparison) -> str:
    """What is compared, who judges it, and how."""
    words = comparison.metric.description
    judge = f", judged by {comparison.judge}" if comparison.judge else ""
    direction = "lower" if comparison.test.lower_is_better else "higher"
    return f"{words[0].upper()}{words[1:]}{judge}; {direction} is better. The unit is the run; runs are paired by seed."


def explanation(contrast: Contrast, comparison: Comparison) -> str:
    """What may be concluded from one contrast, and what not, in words."""
    metric, test, found = comparison.metric, comparison.test, contrast.conclusion
    shown = f"{_difference(found.mean, metric)} in {_pairs(found.pairs)}"
    match found.verdict:
        case Verdict.IMPROVEMENT | Verdict.WORSE:
            return f"{found.verdict}: {shown}, adjusted p {_p(found.p_adjusted)}."
        case Verdict.EQUIVALENT:
            return f"equivalent within {_size(test.margin, metric)}: {shown}, adjusted p {_p(found.equivalence_p_adjusted)} (TOST)."
        case Verdict.INCONCLUSIVE:
            return f"inconclusive: {shown}. {_why_inconclusive(found, comparison)}"


def _why_inconclusive(found: Conclusion, comparison: Comparison) -> str:
    metric, test = comparison.metric, comparison.test
    if not found.can_conclude(test.alpha):
        return (
            f"No result of {_pairs(found.pairs)} could be significant: the smallest adjusted p is {_p(found.smallest_p_adjusted)}; "
            f"{comparison.seeds_to_conclude} seeds is the least for {_comparisons(comparison)} at {test.alpha:g}."
        )
    alone = _alone(found, comparison)
    if not found.sd:
        return "All differences are equal, so they say nothing about chance."
    if found.minimal_detectable_effect is None:
        return f"So few as {_pairs(found.pairs)} can be significant only after another comparison is."
    detectable = _size(found.minimal_detectable_effect, metric)
    return f"{alone}A true difference of {detectable} would be found in {100 * test.power:g}% of such campaigns, a smaller one less often."


def _alone(found: Conclusion, comparison: Comparison) -> str:
    """Why an interval without 0 in it, which is of one contrast, is no verdict of the family."""
    if found.interval is None or found.interval[0] <= 0 <= found.interval[1]:
        return ""
    several = len(comparison.contrasts) > 1
    over = f" over {_comparisons(comparison)}" if several else ""
    return f"Its own interval leaves 0 out, and the {'adjusted ' if several else ''}p{over}, {_p(found.p_adjusted)}, does not reach it. "


def _pairs(count: int) -> str:
    return "1 pair" if count == 1 else f"{count} pairs"


def _comparisons(comparison: Comparison) -> str:
    count = len(comparison.contrasts)
    return "one comparison" if count == 1 else f"{count} comparisons"


def details(contrast: Contrast, comparison: Comparison) -> Iterator[str]:
    """What else there is to say of a contrast, a sentence each."""
    metric, test, found = comparison.metric, comparison.test, contrast.conclusion
    if contrast.problem_interval:
        yield f"With problems and samples drawn anew as well: {_interval(contrast.problem_interval, metric)}."
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
    """What the runs of a pair had in common, which is what makes the pairing tight."""
    shared = contrast.shared
    prompts, noise = _of(shared.prompts, shared.pairs), _of(shared.noise, shared.pairs)
    if shared.noise == shared.prompts == shared.pairs:
        return "The arms of every pair saw the same prompts and shared their sampling noise."
    return f"Same prompts in {prompts} pairs, shared sampling noise in {noise}."


def _of(count: int, pairs: int) -> str:
    return "no" if count == 0 else "all" if count == pairs else f"{count} of {pairs}"


def task_words(comparison: Comparison) -> str:
    few = min(arm.runs for arm in comparison.arms if arm.tasks) < _ENOUGH_RUNS
    caution = f", too narrow below some {_ENOUGH_RUNS} runs" if few else ""
    confidence = f"{100 * (1 - comparison.test.alpha):g}%"
    return f"Over tasks (interquartile mean of runs x tasks, {confidence} interval from runs resampled within tasks{caution}):"


def task_table(comparison: Comparison) -> "Table":
    contrasts = {contrast.condition: contrast.tasks for contrast in comparison.contrasts}
    rows = []
    for arm in comparison.arms:
        if arm.tasks:
            against = contrasts.get(arm.label)
            difference = (
                f"{_difference(against.iqm_difference, comparison.metric)} ({_interval(against.interval, comparison.metric)})"
                if against
                else ""
            )
            chance = f"{100 * against.probability_of_improvement:.0f}%" if against else ""
            low, high = arm.tasks.interval
            shown = f"{100 * arm.tasks.iqm:.1f}% ({100 * low:.1f} to {100 * high:.1f})"
            rows.append((arm.label, str(len(arm.tasks.tasks)), shown, difference, chance))
    return ("condition", "tasks", "IQM", "difference", "a run beats the baseline's"), rows


# -- numbers in words ----------------------------------------------------------------------------------------------------

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""(head, rows)"""


def arm_table(comparison: Comparison) -> Table:
    return ("condition", "runs", "mean", "sd between runs"), [_arm_row(arm, comparison.metric) for arm in comparison.arms]


def contrast_table(comparison: Comparison) -> Table:
    """The verdict comes last."""
    test = comparison.test
    confidence = f"{100 * (1 - test.alpha):g}% interval"
    head = ("condition", "pairs", "difference", confidence, "p", "adjusted p", "d_z", f"detectable ({100 * test.power:g}%)", "verdict")
    return head, [_contrast_row(contrast, comparison) for contrast in comparison.contrasts]


def _arm_row(arm: ArmSummary, metric: Metric) -> tuple[str, ...]:
    mean = "" if arm.mean is None else f"{100 * arm.mean:.1f}%" if metric.is_rate else f"{arm.mean:.4g}"
    return arm.label, str(arm.runs), mean, _size(arm.sd, metric)


def _contrast_row(contrast: Contrast, comparison: Comparison) -> tuple[str, ...]:
    metric, found = comparison.metric, contrast.conclusion
    return (
        contrast.condition,
        str(found.pairs),
        _difference(found.mean, metric),
        _interval(found.interval, metric) if found.interval else "",
        _p(found.p),
        _p(found.p_adjusted),
        "" if found.d_z is None else f"{found.d_z:.2f}",
        _size(found.minimal_detectable_effect, metric) if found.can_conclude(comparison.test.alpha) else "none",
        str(found.verdict),
    )


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


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A Markdown table with its columns aligned for a terminal."""
    clean = [[cell.replace("|", "\\|") for cell in row] for row in (head, *rows)]
    widths = [max(len(row[column]) for row in clean) for column in range(len(head))]
    for index, row in enumerate(clean):
        yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        if index == 0:
            yield "|" + "|".join("-" * (width + 2) for width in widths) + "|"


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


_GAP = "  "
_SHOWN = (0, 1, 2, 3, 5, 8)
"""Of a contrast's columns: condition, pairs, difference, interval, adjusted p, verdict. The others are in its sentences."""


def to_text(comparison: Comparison, width: int = 80) -> str:
    return "\n".join(_lines(comparison, width)) + "\n"


def _lines(comparison: Comparison, width: int) -> Iterator[str]:
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
        said = [*([sharing(contrast)] if len(shared) > 1 else []), _numbers(head, row), *details(contrast, comparison)]
        yield from (line for sentence in said for line in _wrapped(sentence, width, "  "))
    if any(arm.tasks for arm in comparison.arms):
        yield ""
        yield from _wrapped(task_words(comparison), width, after="")
        yield from _aligned(task_table(comparison), width)
    for title, sentences in (("Notes", comparison.notes), ("Left out", comparison.left_out)):
        if sentences:
            yield from ("", f"{title}:")
            for sentence in sentences:
                yield from _wrapped(f"- {sentence}", width)


def _numbers(head: Sequence[str], row: Sequence[str]) -> str:
    """What the narrow table leaves out."""
    left = [f"{name} {cell}" for column, (name, cell) in enumerate(zip(head, row, strict=True)) if column not in _SHOWN and cell]
    return f"Also: {', '.join(left)}."


def _wrapped(text: str, width: int, indent: str = "", after: str = "  ") -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent + after, break_long_words=False, break_on_hyphens=False
    )


def _aligned(table: Table, width: int) -> Iterator[str]:
    """Columns, the first and the last to the left; each row below its label where the lines would be wider than the terminal."""
    head, rows = table
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    below = sum(widths) + len(_GAP) * (len(widths) - 1) > width
    outer = (0, len(widths) - 1)
    for row in (head, *rows):
        cells = [f"{cell:{'<' if place in outer else '>'}{widths[place]}}" for place, cell in enumerate(row)]
        if below:
            yield row[0]
            yield (_GAP + _GAP.join(cells[1:])).rstrip()
        else:
            yield _GAP.join(cells).rstrip()

"""Write a comparison for its readers: aligned text for a terminal, Markdown, and one JSON object
with stable keys.

The texts begin with the answer. The conditions, every seed, the contrasts, the limits of the
verdicts, and the computation follow.
"""

import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from retrain.analysis.arms import Arm
from retrain.analysis.compare import Comparison, Contrast
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
from retrain.records.terminal import GAP, markdown_lines, table_lines
from retrain.system import Json

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""(head, rows)"""

_HIDDEN = ("other problems", "p", "effect size d_z")
"""Columns of `contrast_table` that a terminal has no room for; the sentences have them."""
_PARTS = ("eval sd", "seed sd")
HIDDEN = (*_HIDDEN, *_PARTS)
"""Columns for which a narrow terminal has no room."""


@dataclass(frozen=True)
class Block:
    """A table or sentences, under a title or without one."""

    sentences: Sequence[str] = ()
    title: str = ""
    table: Table | None = None


def blocks(comparison: Comparison, hidden: Collection[str] = ()) -> Iterator[Block]:
    """Yield the answer first. The `hidden` columns of `contrast_table` follow as sentences."""
    yield Block([answer(comparison)])
    if comparison.planned:
        yield Block([comparison.planned])
    yield Block(table=arm_table(comparison))
    yield Block([seed_line(contrast, comparison) for contrast in comparison.contrasts])
    yield Block(table=contrast_table(comparison, hidden))
    own, shared = remarks(comparison)
    level = f"{100 * (1 - comparison.test.alpha):g}%"
    for contrast, said in zip(comparison.contrasts, own, strict=True):
        cells = _contrast_cells(contrast, comparison).items()
        unseen = {name: cell for name, cell in cells if cell and name in hidden}
        wide = unseen.pop("other problems", "")
        also = f"If other problems had been drawn: {wide} ({level}). " * bool(wide)
        if unseen:
            said.append(f"{also}{', '.join(map(' '.join, unseen.items()))}.")
        yield Block(said, name_of(contrast, comparison))
    if shared:
        yield Block(shared, "All of these")
    if comparison.tasks:
        over = f"interquartile mean of runs x tasks, {level} interval for new runs"
        yield Block(title=f"Over tasks ({over})", table=task_table(comparison))
    yield from sections(comparison)


def to_markdown(comparison: Comparison) -> str:
    lines = []
    for block in blocks(comparison):
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
    for block in blocks(comparison, narrowed(comparison, width)):
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


def narrowed(comparison: Comparison, width: int) -> Sequence[str]:
    """Return the columns of `contrast_table` that a terminal has no room for."""
    head, rows = contrast_table(comparison, _HIDDEN)
    wide = max(map(len, table_lines([head[1:], *(row[1:] for row in rows)]))) > width - 2
    return HIDDEN if wide else _HIDDEN


def sections(comparison: Comparison) -> Iterator[Block]:
    """Yield each section that follows the verdicts."""
    shared = {name_of(one, comparison): sharing(one) for one in comparison.contrasts}
    together = [*dict.fromkeys(shared.values())]
    if len(together) > 1:
        together = [f"{name}: {words}" for name, words in shared.items()]
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
            yield Block(sentences, title)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def _aligned(table: Table, width: int) -> list[str]:
    """Align labels and the last column to the left, numbers to the right. A table wider than the
    terminal has each label on a line of its own.
    """
    rows = [table[0], *table[1]]
    numbers = range(1, len(table[0]) - 1)
    lines = list(table_lines(rows, right=numbers))
    if max(map(len, lines)) <= width:
        return lines
    labels, *columns = zip(*rows, strict=True)
    cells = table_lines([*zip(*columns)], right=range(len(columns) - 1), indent=GAP)
    return [*chain.from_iterable(zip(labels, cells, strict=True))]


# -- tables ----------------------------------------------------------------------------------------


def seed_line(contrast: Contrast, comparison: Comparison) -> str:
    """Return every seed's difference, and the difference that speaks most against the mean."""
    metric, found = comparison.metric, contrast.differences
    values = " ".join(
        difference_words(value, metric).removesuffix(" pp") for value in found.values()
    )
    seeds = f"seed{'s' * (len(found) > 1)} {' '.join(map(str, found))}"
    line = f"{name_of(contrast, comparison)}, {seeds}: {values}{' pp' * metric.is_rate}"
    if len(found) == 1:
        return line
    end, pick = ("smallest", min) if contrast.conclusion.mean >= 0 else ("largest", max)
    seed = pick(found, key=found.__getitem__)
    return f"{line}; {end} {difference_words(found[seed], metric)} (seed {seed})"


def arm_table(comparison: Comparison) -> Table:
    arms, metric = comparison.arms, comparison.metric
    lost = [name for name in ("failed", "collapsed") if any(getattr(arm, name) for arm in arms)]
    unjudged = any(arm.unjudged for arm in arms)
    unit, units = ("minutes", 60) if all((arm.hours or 0) < 1 for arm in arms) else ("hours", 1)
    # A budget cuts the runs, but not their cost.
    run = "whole run" if comparison.request.budget else "run"
    rows = [
        {
            "condition": arm.label,
            " / ".join(["done", *lost]) if lost else "runs": " / ".join(
                str(len(getattr(arm, name))) for name in ("runs", *lost)
            ),
            "mean": _mean_words(arm, metric),
            "sd between runs": size_words(arm.sd, metric),
            "unjudged": f"{arm.unjudged:,} of {arm.answered:,}" if unjudged else "",
            f"tokens per {run}": _or_nothing(arm.per_run("tokens"), ",.0f"),
            f"{unit} per {run}": _or_nothing(arm.hours and arm.hours * units, ".2g"),
        }
        for arm in arms
    ]
    return _table(rows, rows[0])


def _table(
    rows: Sequence[Mapping[str, str]], optional: Iterable[str], hidden: Collection[str] = ()
) -> Table:
    """Leave out the `hidden` columns, and each `optional` one without a cell."""
    empty = [name for name in optional if not any(row[name] for row in rows)]
    head = [name for name in rows[0] if name not in (*empty, *hidden)]
    return head, [[row[name] for name in head] for row in rows]


def _or_nothing(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _mean_words(arm: Arm, metric: Metric) -> str:
    if arm.mean is None:
        return ""
    return format(arm.mean, ".1%" if metric.is_rate else ".4g")


def ranked(comparison: Comparison) -> list[Arm]:
    """Return the conditions of a grid from the best mean to the worst; empty without a grid."""
    grid = comparison.request.record.grid
    measured = [arm for arm in comparison.arms if arm.mean is not None and grid]
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


def contrast_table(comparison: Comparison, hidden: Collection[str] = ()) -> Table:
    """Return one row per contrast, the verdict last, without the `hidden` columns."""
    rows = [_contrast_cells(contrast, comparison) for contrast in comparison.contrasts]
    optional = ["other problems", *_PARTS, *[_TOST] * (comparison.test.margin is None)]
    return _table(rows, optional, hidden)


_TOST = "p (TOST)"


def _contrast_cells(contrast: Contrast, comparison: Comparison) -> dict[str, str]:
    metric, alpha = comparison.metric, comparison.test.alpha
    found, parts = contrast.conclusion, contrast.parts
    return {
        "condition" if comparison.one_baseline else "contrast": name_of(contrast, comparison),
        "pairs": str(found.pairs),
        "difference": difference_words(found.mean, metric),
        f"{100 * (1 - alpha):g}% interval": interval_words(found.interval, metric),
        "other problems": interval_words(contrast.wide, metric),
        "eval sd": size_words(parts.noise_variance**0.5 if parts else None, metric),
        "seed sd": size_words(parts.luck_variance**0.5 if parts else None, metric),
        "p": p_words(found.p),
        "adjusted p": p_words(found.p_adjusted),
        _TOST: p_words(found.equivalence_p_adjusted),
        "effect size d_z": _or_nothing(found.d_z, ".2f"),
        "verdict": found.word,
    }


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
    for label, found in comparison.tasks.items():
        ends = ""
        if found.interval:
            low, high = found.interval
            ends = f" ({100 * low:.1f} to {100 * high:.1f})"
        difference = chance = ""
        if against := contrasts.get(label):
            difference = (
                f"{difference_words(against.iqm_difference, metric)}"
                f" ({interval_words(against.interval, metric)})"
            )
            chance = f"{against.probability_of_improvement:.0%}"
        rows.append((label, str(len(found.scores)), f"{found.iqm:.1%}{ends}", difference, chance))
    return ("condition", "tasks", "IQM", "difference", "a run beats the baseline's"), rows


# -- as data ---------------------------------------------------------------------------------------


def to_json(comparison: Comparison) -> Json:
    """Return the comparison as JSON values, differences and means in the metric's own units; absent
    values are null.
    """
    test = comparison.test
    budget = comparison.request.budget
    at = {"at": asdict(budget)} if budget else {}
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
        "looks": [asdict(look) for look in comparison.looks] or None,
        "seeds_to_conclude": comparison.seeds_to_conclude,
        "to_come": comparison.to_come,
        "arms": [
            {
                "label": arm.label,
                "runs": len(arm.runs),
                "failed": len(arm.failed),
                "collapsed": len(arm.collapsed),
                "mean": arm.mean,
                "sd": arm.sd,
                "unjudged": arm.unjudged,
                "answered": arm.answered,
                "tokens": arm.per_run("tokens"),
                "hours": arm.hours,
                "tasks": _as_json(comparison.tasks.get(arm.label)),
                "condition": arm.label,
            }
            for arm in comparison.arms
        ],
        "ranking": [arm.label for arm in ranked(comparison)] or None,
        "contrasts": [_contrast_json(contrast, comparison) for contrast in comparison.contrasts],
        "known_limits": list(known_limits(comparison)),
        "notes": list(comparison.notes),
        "left_out": list(comparison.left_out),
    }


_SAME_NAME = (
    "p p_adjusted smallest_p_adjusted can_conclude d_z detectable seeds_needed"
    " equivalence_p_adjusted within_margin"
)
"""Fields of a Conclusion that JSON calls the same."""


def _contrast_json(contrast: Contrast, comparison: Comparison) -> Json:
    found, shared, parts = contrast.conclusion, contrast.shared, contrast.parts
    return {
        "condition": contrast.condition,
        "baseline": contrast.baseline,
        "verdict": found.verdict.value,
        "word": found.word,
        "explanation": " ".join(explanation(contrast, comparison)),
        "pairs": found.pairs,
        "differences": {str(seed): value for seed, value in contrast.differences.items()},
        "mean_difference": found.mean,
        "sd": found.sd,
        "interval": found.interval,
        "problem_interval": contrast.wide,
        "unjudged_bounds": found.bounds,
        **{name: getattr(found, name) for name in _SAME_NAME.split()},
        "same_runs": contrast.same_runs,
        "losses": _as_json(contrast.losses),
        "pairing": _as_json(contrast.pairing),
        "noise_sd": parts.noise_variance**0.5 if parts else None,
        "luck_sd": parts.luck_variance**0.5 if parts else None,
        "same_prompts": shared.prompts,
        "shared_noise": shared.noise,
        "differing_keys": shared.differing_keys,
        "differing_environment": shared.environment,
        "tasks": _as_json(contrast.tasks),
    }


def _as_json(found: Any) -> Json | None:
    """Return the fields of a dataclass; None for None."""
    return asdict(found) if found else None

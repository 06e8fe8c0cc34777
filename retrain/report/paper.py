"""The parts of a report for a paper: every figure as vector graphics, the table as CSV and
Markdown, and a sentence for the section on methods.
"""

import csv
from collections.abc import Iterator, Sequence
from io import StringIO
from pathlib import Path

from retrain import __version__
from retrain.analysis.arms import differing_keys
from retrain.analysis.compare import Comparison, Contrast
from retrain.analysis.comparison_text import contrast_table
from retrain.analysis.runs import StoredRun, seeds_words
from retrain.config import moving
from retrain.errors import EnvironmentFailure
from retrain.records.disk import replace_file
from retrain.records.redact import Redactor
from retrain.records.terminal import clean, counted, markdown_lines
from retrain.report.data import ConditionCurves, ReportData
from retrain.report.drawing import PageFigure, to_picture
from retrain.system import listed

FORMATS = ("svg", "pdf", "png")
Table = tuple[Sequence[str], list[list[str]]]
"""(head, rows)"""


def write_paper(
    data: ReportData, figures: Sequence[PageFigure], folder: Path, formats: Sequence[str]
) -> list[Path]:
    """Write <figure>.<format>, table.csv, table.md and methods.md into `folder`. Raises
    EnvironmentFailure if they cannot be written.
    """
    masked = Redactor().text
    head, rows = _table(data)
    sheet = StringIO()
    csv.writer(sheet, lineterminator="\n").writerows([head, *rows])
    texts = {"table.csv": sheet.getvalue(), "table.md": "\n".join(_shown_table(data)) + "\n"}
    captions = [f"- **{drawn.name}** ({drawn.title}): {drawn.caption}" for drawn in figures]
    texts["methods.md"] = "\n".join([methods(data), "", *captions]) + "\n"
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for drawn in figures:
            for form in formats:
                path = folder / f"{drawn.name}.{form}"
                replace_file(path, to_picture(drawn.figure, drawn.name, form))
                written.append(path)
        for name, text in texts.items():
            replace_file(folder / name, clean(masked(text)))
            written.append(folder / name)
    except OSError as error:
        raise EnvironmentFailure(
            f"{folder} cannot be written: {error.strerror or error}; name another folder with"
            " --figures."
        ) from error
    return written


# -- the table -------------------------------------------------------------------------------------


def _table(data: ReportData) -> Table:
    """The numbers as they are, in the metric's own units: a row per condition, or per evaluation of
    a single run.
    """
    comparison = data.comparison
    if comparison is None:
        rows = [
            [arm.label, *map(str, (run.seed, point.step, point.accuracy, *point.interval))]
            for arm in data.arms
            for run, points in zip(arm.runs, arm.held_out, strict=True)
            for point in points
        ]
        return ("condition", "seed", "step", "pass@1", "low", "high"), rows
    return _COMPARED, list(_compared_rows(comparison))


_COMPARED = (
    *("condition", "runs", "failed", "mean", "sd between runs", "baseline", "pairs"),
    *("difference", "low", "high", "p", "adjusted p", "verdict"),
)


def _compared_rows(comparison: Comparison) -> Iterator[list[str]]:
    """A row for each contrast of an arm; one for an arm that is compared with none."""
    for arm in comparison.arms:
        own: list[Contrast | None] = [
            one for one in comparison.contrasts if one.condition == arm.label
        ]
        for contrast in own or [None]:
            row: list[object] = [arm.label, arm.runs, arm.failed, arm.mean, arm.sd]
            if contrast is not None:
                found = contrast.conclusion
                row += [contrast.baseline, found.pairs, found.mean]
                row += [*(found.interval or (None, None)), found.p, found.p_adjusted]
                row.append(found.word(comparison.test.alpha))
            cells = ["" if value is None else str(value) for value in row]
            yield cells + [""] * (len(_COMPARED) - len(cells))


def _shown_table(data: ReportData) -> Iterator[str]:
    """The table in Markdown, rounded, with the condition, its result and its verdict."""
    if data.comparison is None:
        points = [
            (arm.label, str(run.seed), str(point.step), _rate(point.accuracy, point.interval))
            for arm in data.arms
            for run, held_out in zip(arm.runs, arm.held_out, strict=True)
            for point in held_out
        ]
        yield from markdown_lines(("condition", "seed", "step", "held-out pass@1"), points)
        return
    head, rows = contrast_table(data.comparison)
    kept = [head.index(name) for name in head if name in _SHOWN or name.endswith("% interval")]
    yield from markdown_lines(
        [head[column] for column in kept], [[row[column] for column in kept] for row in rows]
    )


_SHOWN = ("condition", "contrast", "difference", "adjusted p", "verdict")


def _rate(value: float, interval: tuple[float, float]) -> str:
    low, high = interval
    return f"{value:.1%} [{100 * low:.1f}, {100 * high:.1f}]"


# -- in words --------------------------------------------------------------------------------------


def methods(data: ReportData) -> str:
    """A sentence on what was trained, and one on how it was compared."""
    if not data.arms:
        return "No run has begun."
    first = data.arms[0].runs[0]
    training, model = first.config.training, first.config.model
    version = first.environment.get("retrain") or __version__
    size = f"{counted(training.batch_size, 'prompt')} with {training.group_size} completions"
    trained = (
        f"{_conditions(data.arms)} trained with retrain {version} from {model.model} with LoRA"
        f" adapters of rank {model.lora_rank} for {counted(training.max_steps, 'step')} of {size}"
        f" each ({_settings(first)}).{_apart(data.arms)}"
    )
    comparison = data.comparison
    if comparison is None:
        return f"{trained} Intervals of held-out pass@1 are 95% intervals over the problems."
    level = f"{100 * (1 - comparison.test.alpha):g}%"
    problems = ""
    if comparison.problems:
        problems = f" on {counted(comparison.problems, 'problem')}"
    against = ""
    if comparison.one_baseline:
        against = f" with {comparison.baseline}"
    tested = "exact sign-flip tests"
    if comparison.test.rule == "evidence":
        tested = "an e-process that is looked at after every seed"
    family = ""
    if comparison.family > 1:
        family = f", adjusted over {counted(comparison.family, 'comparison')}"
    return (
        f"{trained} Runs were compared{against} as wholes, paired by seed, by"
        f" {comparison.metric.name}{problems}; intervals are {level} intervals of the mean"
        f" difference over the seeds, and p values come from {tested}{family}."
    )


def _settings(run: StoredRun) -> str:
    """Learning rate and temperature, and what [schedule] moves in place of the file's value."""
    config = run.config
    named = {"training.lr": "learning rate", "training.temperature": "temperature"}
    fixed = [
        f"{words} {config.value(path):g}"
        for path, words in named.items()
        if path not in config.schedule.points
    ]
    return ", ".join([*fixed, *moving.words(config)])


def _apart(arms: Sequence[ConditionCurves]) -> str:
    """A sentence on the keys in which the conditions differ; "" if there are none."""
    first, *others = (arm.runs[0] for arm in arms)
    keys = differing_keys([(first, other) for other in others])
    if not keys:
        return ""
    return f" The conditions differ in {', '.join(keys)}; what is named here is {arms[0].label}'s."


def _conditions(arms: Sequence[ConditionCurves]) -> str:
    labels = listed(arm.label for arm in arms)
    seeds = seeds_words(sorted({run.seed for arm in arms for run in arm.runs}))
    return f"{labels} ({seeds}) {'was' if len(arms) == 1 else 'were'}"

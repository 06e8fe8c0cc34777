"""`retrain status [LOGS]`: the progress of runs and campaigns."""

import gc
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import TextWrapper
from typing import TYPE_CHECKING, Annotated

import typer

from retrain.cli.shared import Form
from retrain.system import grouped

if TYPE_CHECKING:
    from retrain.analysis.status import CampaignStatus, Overview, RunStatus

_CLEAR = "\x1b[H\x1b[2J"
_HEADER = (
    "run",
    "state",
    "step",
    "correct",
    "reward",
    "loss",
    "held-out",
    "tokens/s",
    "s/step",
    "left",
)
_EXPENDABLE = ("reward", "tokens/s", "loss", "s/step")
"""Columns that a narrow terminal drops, in this order; --json has them."""


def command(
    logs: Annotated[
        Path,
        typer.Argument(metavar="LOGS", help="A folder of runs, a campaign's or a single run's."),
    ] = Path("logs"),
    form: Form = "text",
    watch: Annotated[
        bool, typer.Option("--watch", help="Print again until nothing is running, or Ctrl-C.")
    ] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, help="Seconds between two prints of --watch.")
    ] = 2.0,
) -> None:
    """Show progress, last metrics, throughput and step time of every run in and below a folder, and
    killed or hanging runs.
    """
    from retrain.records.redact import Redactor
    from retrain.records.terminal import clean

    try:
        while True:
            with _uncollected():
                from retrain.analysis.status import overview

                seen = overview(logs)
            # A pipe has no width, and gets every column.
            width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
            text = json.dumps(seen.to_json()) if form == "json" else "\n".join(lines(seen, width))
            if watch and form == "text" and sys.stdout.isatty():
                sys.stdout.write(_CLEAR)
            sys.stdout.write(clean(Redactor().text(text)) + "\n")
            sys.stdout.flush()
            if not (watch and seen.is_live):
                return
            time.sleep(interval)
    except KeyboardInterrupt:
        if not watch:  # Ctrl-C stops watching.
            raise


@contextmanager
def _uncollected() -> Iterator[None]:
    """Pause garbage collection inside: modules and records stay, and looking through them takes a
    tenth of the time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def lines(seen: "Overview", width: int | None = None) -> list[str]:
    """Return the text for a person: a table for each campaign and one for the other runs. Then it
    lists the stopped runs and explains a small loss.
    """
    if not seen.all_runs and not seen.campaigns:
        return [f"No runs in {seen.folder}."]
    printed: list[str] = []
    for campaign in seen.campaigns:
        printed += [
            campaign_line(campaign),
            *_table(campaign.runs, campaign.path / "runs", width),
            *filter(None, [campaign.evidence, campaign.note]),
            "",
        ]
    if seen.runs:
        printed += [*_table(seen.runs, seen.folder, width), ""]
    printed += [f"{run.name}: {run.note}" for run in seen.all_runs if run.note]
    explained = grouped((run.loss_note, run.name) for run in seen.all_runs if run.loss_note)
    for note, names in explained.items():
        more = [f"{len(names) - 3} more"] * (len(names) > 3)
        some = " and ".join([", ".join(names[:3]), *more])
        printed.append(note if len(names) == len(seen.all_runs) else f"{some}: {note}")
    if width is None:
        return printed
    # A table has two spaces between its columns, and fits.
    keep = TextWrapper(width, break_long_words=False, break_on_hyphens=False).wrap
    return [part for line in printed for part in ([line] if "  " in line else keep(line) or [""])]


def campaign_line(campaign: "CampaignStatus") -> str:
    from retrain.records.terminal import counted, duration

    counts = ", ".join(f"{count} {state}" for state, count in sorted(campaign.counts.items()))
    line = (
        f"Campaign {campaign.path}: {counted(len(campaign.runs), 'run')} ({counts}), step"
        f" {campaign.steps:,} of {campaign.max_steps:,}"
    )
    if campaign.median_step_time_s is not None:
        line += f", median step time {campaign.median_step_time_s:.2f} s"
    if campaign.remaining_s is not None:
        line += f", {duration(campaign.remaining_s)} of steps left"
    return line


def _table(runs: Sequence["RunStatus"], root: Path, width: int | None) -> list[str]:
    """Return a table with name and state on the left and numbers on the right. It leaves out as
    many expendable columns as the width requires.
    """
    from retrain.records.terminal import picked, table_lines

    rows = [_HEADER, *(_cells(run, root) for run in runs)]
    for dropped in range(len(_EXPENDABLE) + 1):
        columns = [
            column for column, name in enumerate(_HEADER) if name not in _EXPENDABLE[:dropped]
        ]
        shown = [picked(row, columns) for row in rows]
        table = list(table_lines(shown, right=range(2, len(columns))))
        if width is None or max(map(len, table)) <= width:
            break
    return table


def _cells(run: "RunStatus", root: Path) -> tuple[str, ...]:
    from retrain.records.terminal import duration, number, one_line

    below = run.path.is_relative_to(root) and run.path != root
    return (
        one_line(str(run.path.relative_to(root) if below else run.path)),
        str(run.state),
        f"{run.steps}/{run.max_steps}" if run.max_steps else "-",
        number(run.correct_rate, ".1%"),
        number(run.mean_reward, ".3f"),
        number(run.loss, ".4f"),
        number(run.held_out, ".1%"),
        number(run.tokens_per_s, ",.0f"),
        number(run.median_step_time_s, ".2f"),
        "-" if run.remaining_s is None else duration(run.remaining_s),
    )

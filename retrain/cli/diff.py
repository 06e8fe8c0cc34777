"""`retrain diff`: the first difference of two runs."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from retrain.cli.shared import Form, print_json

if TYPE_CHECKING:
    from retrain.analysis.folder_comparison import FolderComparison
    from retrain.analysis.runs import StoredRun

_SHOWN = 6
"""Maximum number of fields, or of records of one run alone, in a line."""


def command(
    one: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    other: Annotated[Path, typer.Argument(metavar="OTHER", help="Another run's folder.")],
    form: Form = "text",
) -> None:
    """Find the first step and field in which the records of two runs differ, and name the keys,
    data and versions that differ. Exits with 1 if the records differ.
    """
    from retrain.analysis.folder_comparison import compared
    from retrain.analysis.runs import stored_run

    ours, theirs = stored_run(one), stored_run(other)
    found = compared(ours, theirs, range(max(ours.steps, theirs.steps)))
    if found.parting is None or found.parting.is_end:  # Damage may be the reason.
        ours.check()
        theirs.check()
    if form == "json":
        print_json({"equal": found.parting is None} | asdict(found))
    else:
        if found.parting is None:
            label = ""
            if ours.condition != theirs.condition:
                label = (
                    f" but for the label of the condition ({ours.condition}, {theirs.condition})"
                )
            print(f"The records of {ours.path} and {theirs.path} are equal{label}.")
        for line in difference_lines(ours, theirs, found):
            print(line)
        for run, records in zip((ours, theirs), found.alone, strict=True):
            if records:
                print(f"  Only {run.path} has {first_of(records)}.")
    if found.parting:
        raise typer.Exit(1)


def difference_lines(
    one: "StoredRun", other: "StoredRun", found: "FolderComparison"
) -> Iterator[str]:
    """Yield the first difference of the records, and each difference in the components of the
    runs.
    """
    parting = found.parting
    if parting and parting.is_end:
        shorter = min(one, other, key=lambda run: run.steps)
        yield f"They are equal until {shorter.path} ends; it has no step {parting.step}."
    elif parting:
        fields = f": {first_of(parting.fields)}" if parting.fields else ""
        yield f"First difference: step {parting.step}, in {parting.record}{fields}."
    for difference in found.recorded:
        yield f"  {'Other' if parting else 'Other, without effect'}: {difference}."


def first_of(names: Sequence[str]) -> str:
    """Return the first of many names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more

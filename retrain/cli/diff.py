"""`retrain diff`: where two runs part, and why."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from retrain.cli.shared import AsJson, print_json

if TYPE_CHECKING:
    from retrain.analysis.parting import Parting
    from retrain.analysis.runs import StoredRun

_SHOWN = 6
"""Columns of a record that a line names."""


def command(
    one: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    other: Annotated[Path, typer.Argument(metavar="OTHER", help="Another run's folder.")],
    as_json: AsJson = False,
) -> None:
    """Find the first step, prompt, completion and token in which two runs differ, and name the
    cause: a key, data, a version, a plugin, a verdict, rounding, or weights. Exits with 1 if they
    differ.
    """
    from retrain.analysis.parting import evaluated_alone, parting
    from retrain.analysis.runs import stored_run

    ours, theirs = stored_run(one), stored_run(other)
    for run in (ours, theirs):
        run.check_present()
    steps = range(max(ours.steps, theirs.steps))
    found = parting(ours, theirs, steps)
    if found is None or found.stage == "end":
        refuse_damaged(ours, theirs)
    if found:
        steps = range(found.step)
    alone = {
        str(run.path): evaluated_alone(run, peer, steps)
        for run, peer in ((ours, theirs), (theirs, ours))
    }
    if as_json:
        content = {"equal": found is None, "evaluated_alone": alone}
        print_json(content | parting_json(ours, theirs, found))
    else:
        print("\n".join(parting_lines(ours, theirs, found)))
        for path, evaluated in alone.items():
            if evaluated:
                print(f"  Only {path} was evaluated at step {', '.join(map(str, evaluated))}.")
    if found:
        raise typer.Exit(1)


def refuse_damaged(one: "StoredRun", other: "StoredRun") -> None:
    """Raise RunFailed if damage to the records of a run may be why two runs look equal, or why one
    seems to end earlier.
    """
    from retrain.errors import RunFailed

    problem = one.lost_steps or other.lost_steps
    if one.steps != other.steps:
        problem = problem or min(one, other, key=lambda run: run.steps).damage
    if problem:
        raise RunFailed(problem)


def parting_lines(
    one: "StoredRun", other: "StoredRun", found: "Parting | None", start: int = 0
) -> Iterator[str]:
    """Lines on the first difference of two runs in the steps from `start`, and on its possible
    causes.
    """
    from retrain.analysis.parting import causes

    reasons = list(causes(one, other, found, start))
    if found is None:
        yield f"The records of {one.path} and {other.path} are equal."
        for reason in reasons:
            yield f"  Recorded differently, without effect: {reason}."
        return
    if found.stage == "end":
        shorter = min(one, other, key=lambda run: run.steps)
        yield f"They are equal until {shorter.path} ends; it has no step {found.step}."
    else:
        names = ", ".join(found.fields[:_SHOWN])
        more = ""
        if len(found.fields) > _SHOWN:
            more = f" and {len(found.fields) - _SHOWN} more"
        yield f"They part at step {found.step}, in the {found.stage}: {names}{more}."
    if found.token:
        ours, theirs = ("the end" if each is None else str(each) for each in found.token.ids)
        yield (
            f"  First other token: prompt {found.token.slot}, sample {found.token.sample}, token"
            f" {found.token.position}: {ours} and {theirs}; log-probs before it differ by at most"
            f" {found.token.drift:.2g} nats."
        )
    for place, reason in enumerate(reasons):
        yield f"  {'Also' if place else 'Cause'}: {reason}."


def parting_json(
    one: "StoredRun", other: "StoredRun", found: "Parting | None", start: int = 0
) -> dict[str, Any]:
    """The same as JSON values."""
    from retrain.analysis.parting import causes

    return {
        "parting": asdict(found) if found else None,
        "causes": list(causes(one, other, found, start)),
    }

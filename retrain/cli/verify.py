"""`retrain verify`: recompute steps and compare every number, token and adapter."""

import re
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from retrain.cli.diff import difference_lines, first_of
from retrain.cli.shared import Form, Trust, load_dotenv, print_json, print_progress
from retrain.errors import ConfigurationError, RunFailed

if TYPE_CHECKING:
    from retrain.analysis.folder_comparison import FolderComparison
    from retrain.analysis.runs import StoredRun


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder; it is only read.")],
    steps: Annotated[
        str,
        typer.Option(
            metavar="A:B",
            help="Verify the steps from A to before B; by default those since the last checkpoint"
            " before the end.",
        ),
    ] = "",
    trust: Trust = False,
    form: Form = "text",
) -> None:
    """Recompute steps of a run from the nearest sealed checkpoint, and compare records, answers,
    stored tokens and adapters byte for byte. Exits with 1 at the first difference.
    """
    from retrain.analysis.folder_comparison import compared
    from retrain.analysis.runs import StoredRun, stored_run

    load_dotenv()
    stored = stored_run(run)
    begin, stop = _asked(stored, steps, trust)
    with TemporaryDirectory(prefix="retrain-verify-") as scratch:
        again = StoredRun(Path(scratch) / "run")
        _replay(stored, begin, stop, again.path)
        found = compared(stored, again, range(begin, stop))
        lines = [*difference_lines(stored, again, found)]
    if form == "json":
        content = {"equal": found.parting is None, "steps": [begin, stop], **asdict(found)}
        print_json(content | {"damage": stored.unsound or None})
    else:
        if found.parting is None:
            _print_verified(stored, range(begin, stop), found)
        for line in lines:
            print(line)
    if found.parting is None or found.parting.is_end:
        stored.check()
    if found.parting:
        raise typer.Exit(1)


def _asked(run: "StoredRun", steps: str, trust: bool) -> tuple[int, int]:
    """Return the checkpoint to begin at and the step to stop before. Raises ConfigurationError for
    a run or steps that retrain cannot verify.
    """
    from retrain.backends.base import backend_kind
    from retrain.records.run_folder import refuse_foreign_code
    from retrain.run.replay import nearest_checkpoint

    if not trust:
        refuse_foreign_code(run.config, "verifying it")
    if not (backend_kind(run.config.backend.backend).in_process and run.has_counter_noise):
        raise ConfigurationError(
            f"{run.path} used a service or a server, whose bytes differ each time; verify works"
            " for runs that sample and learn in one process."
        )
    start, stop = _range(steps, run)
    return nearest_checkpoint(run.folder, start, print_progress), stop


def _print_verified(run: "StoredRun", steps: range, found: "FolderComparison") -> None:
    """Print which steps are the same, and which files the command could not compare."""
    which = f"steps {steps[0]} to {steps[-1]} of {run.path} are"
    if len(steps) == 1:
        which = f"step {steps[0]} of {run.path} is"
    print(f"Verified: {which} the same, byte for byte.")
    recorded, made = found.alone
    if made:
        print(f"Not there, and so not compared: {first_of(made)}.")
    if recorded:
        print(f"Not made again by config.toml, and so not compared: {first_of(recorded)}.")


def _replay(run: "StoredRun", start: int, stop: int, scratch: Path) -> None:
    """Take the steps again; an error names a damaged file in the run, not its copy."""
    from retrain.config.load import trusted
    from retrain.run.replay import replayed
    from retrain.run.start import NotResumable

    def of_the_run(sentence: str) -> str:
        return sentence.replace(str(scratch), str(run.path))

    print_progress(f"Taking steps {start} to {stop - 1} of {run.path} again ...")
    # `_asked` has refused code without trust.
    config = trusted(run.config)
    try:
        with replayed(run.folder, config, start, stop, scratch):
            pass
    except NotResumable as error:
        raise ConfigurationError(
            of_the_run(
                f"Verify cannot start from step {start} of {run.path}, since {error.problem};"
                f" {error.remedy}, or verify other --steps."
            )
        ) from error
    except ConfigurationError as error:
        raise ConfigurationError([*map(of_the_run, error.problems)]) from error
    except RunFailed as error:
        raise RunFailed(of_the_run(str(error))) from error


def _range(text: str, run: "StoredRun") -> tuple[int, int]:
    """Return the steps to verify. Raises ConfigurationError for a range that the run does not
    hold.
    """
    from retrain.run.replay import nearest_checkpoint

    taken = run.steps
    if not taken:
        raise ConfigurationError(
            run.unsound
            or f"{run.path} has no step of reinforcement yet; there is nothing to verify."
        )
    if not text:
        return nearest_checkpoint(run.folder, taken - 1, print_progress), taken
    parts = re.fullmatch(r"(\d*):(\d*)", text)
    if parts:
        start, stop = int(parts[1] or 0), int(parts[2] or taken)
    if not parts or not 0 <= start < stop <= taken:
        raise ConfigurationError(
            f"--steps {text} is not a range of the steps of {run.path}; give A:B with 0 <= A <"
            f" B <= {taken}, such as 0:{taken}."
        )
    return start, stop

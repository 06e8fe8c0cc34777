"""`retrain verify`: takes recorded steps again and compares every number, token and adapter."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from retrain.cli.diff import parting_json, parting_lines, refuse_damaged
from retrain.cli.shared import AsJson, Trust, load_dotenv, print_json, print_progress
from retrain.errors import ConfigurationError, RunFailed

if TYPE_CHECKING:
    from retrain.analysis.parting import Parting
    from retrain.analysis.runs import StoredRun
    from retrain.run.session import Session

_SHOWN = 6
"""Things that a run does not have, by name."""


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
    as_json: AsJson = False,
) -> None:
    """Take steps of a run again, from the nearest sealed checkpoint, and compare records, answers,
    stored tokens and adapters byte for byte. Exits with 1 at the first difference.
    """
    from retrain.analysis.parting import absent, adapters_differ, files_differ
    from retrain.analysis.runs import StoredRun, stored_run

    load_dotenv()
    stored = stored_run(run)
    begin, stop = _asked(stored, steps, trust)
    taken = range(begin, stop)
    with TemporaryDirectory(prefix="retrain-verify-") as scratch:
        again = StoredRun(Path(scratch) / "run")
        _replay(stored, begin, stop, again.path)
        found = _parting(stored, again, taken)
        other_file = files_differ(stored, again, taken)
        other_adapter = adapters_differ(stored, again)
        missing = absent(stored, again, taken)
        # Here, since the causes read files of the replay, which goes with its folder.
        draw = _first_draw(stored, again, begin, found)
        lines = [*parting_lines(stored, again, found, begin), *_draw_lines(draw)]
        content = parting_json(stored, again, found, begin)
    equal = found is None and not other_file and other_adapter is None
    if as_json:
        print_json(
            content
            | {
                "steps": [begin, stop],
                "equal": equal,
                "other_file": other_file or None,
                "other_adapter": other_adapter,
                "missing": missing,
                "damage": stored.damage or None,
                "draw": draw,
            }
        )
    elif equal:
        _print_verified(stored, taken, lines, missing)
    elif found:
        print("\n".join(lines))
    else:
        print(f"Records are equal, and {_beside_records(other_file, other_adapter or 0)}.")
    if not equal:
        raise typer.Exit(1)


def _asked(run: "StoredRun", steps: str, trust: bool) -> tuple[int, int]:
    """The checkpoint to begin at and the step to stop before. Raises ConfigurationError for a run
    or steps that cannot be verified.
    """
    from retrain.records.run_folder import refuse_foreign_code
    from retrain.run.replay import nearest_checkpoint

    if not trust:
        refuse_foreign_code(run.config, "verifying it")
    _refuse_served(run)
    start, stop = _range(steps, run)
    return nearest_checkpoint(run.folder, start, print_progress), stop


def _parting(stored: "StoredRun", again: "StoredRun", steps: range) -> "Parting | None":
    """Return the first difference. Raises RunFailed where the run's damaged records have none of
    the steps.
    """
    from retrain.analysis.parting import parting

    found = parting(stored, again, steps)
    if found and found.stage == "end":
        refuse_damaged(stored, again)
    return found


def _print_verified(run: "StoredRun", steps: range, lines: list[str], things: list[str]) -> None:
    """Print what was recorded differently, the first of what a run does not have, with how many
    more there are, and how its records are damaged.
    """
    which = f"steps {steps[0]} to {steps[-1]} of {run.path} are"
    if len(steps) == 1:
        which = f"step {steps[0]} of {run.path} is"
    print(f"Verified: {which} the same, byte for byte.")
    for line in lines[1:]:  # the first says that they are equal
        print(line)
    if things:
        more = [f"and {len(things) - _SHOWN} more"] * (len(things) > _SHOWN)
        print(f"Not there, and so not compared: {', '.join([*things[:_SHOWN], *more])}.")
    if run.damage:
        print(run.damage)


def _beside_records(other_file: str, steps: int) -> str:
    """Name what differs: a file, or the adapter after a number of steps."""
    from retrain.records.terminal import counted

    if other_file:
        return f"{other_file} holds other answers, tokens or weights"
    return f"the adapter after {counted(steps, 'step')} is another"


def _draw_lines(draw: dict[str, float] | None) -> Iterator[str]:
    if draw:
        yield (
            f"  Its draw here: u = {draw['uniform']:.8f}, and the edge towards the recorded"
            f" token is {draw['edge']:.8f}, {abs(draw['edge'] - draw['uniform']):.1g} away."
        )


def _replay(run: "StoredRun", start: int, stop: int, scratch: Path) -> None:
    print_progress(f"Taking steps {start} to {stop - 1} of {run.path} again ...")
    with _replayed(run, start, stop, scratch):
        pass


@contextmanager
def _replayed(run: "StoredRun", start: int, stop: int, scratch: Path) -> Iterator["Session"]:
    """Take the steps again; a damaged file is named where it lies, and not as its copy."""
    from retrain.config.load import trusted
    from retrain.run.replay import replayed
    from retrain.run.start import NotResumable

    def of_the_run(sentence: str) -> str:
        return sentence.replace(str(scratch), str(run.path))

    # `_asked` has refused what was not to be trusted.
    config = trusted(run.config)
    try:
        with replayed(run.folder, config, start, stop, scratch) as session:
            yield session
    except NotResumable as error:
        raise ConfigurationError(
            of_the_run(
                f"{run.path} cannot be verified from step {start}: {error.problem}; {error.remedy},"
                " or verify other --steps."
            )
        ) from error
    except ConfigurationError as error:
        raise ConfigurationError([*map(of_the_run, error.problems)]) from error
    except RunFailed as error:
        raise RunFailed(of_the_run(str(error))) from error


def _first_draw(
    run: "StoredRun", again: "StoredRun", start: int, found: "Parting | None"
) -> dict[str, float] | None:
    """The uniform of the first other token, and the edge of its range towards the recorded one: how
    much rounding it takes. The steps before are taken once more; None where nothing can be said.
    """
    from retrain.analysis.parting import ids_until
    from retrain.run.replay import draw_of

    if not found or not found.token:
        return None
    token = found.token
    recorded, here = token.ids
    if recorded is None or here is None:
        return None
    ids = ids_until(again, found.step, token)
    if ids is None:
        return None
    with _replayed(run, start, found.step, again.path.with_name("draw")) as session:
        draw = draw_of(session, ids, token.slot, token.sample, token.position)
    if draw is None:
        return None
    if recorded < here:
        edge = draw.lower
    else:
        edge = draw.upper
    return {"uniform": draw.uniform, "edge": edge}


def _refuse_served(run: "StoredRun") -> None:
    """Raise ConfigurationError for a run whose sampler or learner was not in its own process."""
    from retrain.backends.base import backend_kind

    if not (backend_kind(run.config.backend.backend).in_process and run.has_counter_noise):
        raise ConfigurationError(
            f"{run.path} was sampled or trained by a service or a server, whose bytes are not the"
            " same twice; runs that sample and learn in one process can be verified."
        )


def _range(text: str, run: "StoredRun") -> tuple[int, int]:
    """The steps to verify. Raises ConfigurationError for a range that the run does not hold."""
    from retrain.run.replay import nearest_checkpoint

    taken = run.steps
    if not taken:
        raise ConfigurationError(
            run.damage or f"{run.path} has no step yet; there is nothing to verify."
        )
    if not text and run.lost_steps:
        raise ConfigurationError(f"{run.lost_steps} Or name --steps that are there.")
    if not text:
        return nearest_checkpoint(run.folder, taken - 1, print_progress), taken
    parts = re.fullmatch(r"(\d*):(\d*)", text)
    if parts:
        start, stop = int(parts[1] or 0), int(parts[2] or taken)
    if not parts or not 0 <= start < stop <= taken:
        raise ConfigurationError(
            f"--steps {text} is no range of steps that {run.path} has taken; give A:B with"
            f" 0 <= A < B <= {taken}, such as 0:{taken}."
        )
    return start, stop

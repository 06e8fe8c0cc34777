"""`retrain explain [FILE]`: what a configuration would do, and its memory, time and cost."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from retrain.cli.shared import AsJson, Form, Trust, load_dotenv, print_progress
from retrain.errors import ConfigurationError, EnvironmentFailure

if TYPE_CHECKING:
    pass

SETTINGS = {"context_settings": {"allow_extra_args": True, "ignore_unknown_options": True}}
"""The file and the configuration's flags are left to its own parser."""
FILE_ARGUMENT = "[FILE]"
_MAX = 1_000_000


def command(
    context: typer.Context,
    pilot: Annotated[
        Path | None,
        typer.Option(metavar="RUN_DIR", help="Take the step time and the spread from these runs."),
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Load everything and measure one step.")
    ] = False,
    price_per_hour: Annotated[
        float | None,
        typer.Option(min=0, help="Price per device hour; overrides [campaign] price_per_hour."),
    ] = None,
    memory_gib: Annotated[
        float | None,
        typer.Option(min=0, help="Predict for a device of this size, whether it is here or not."),
    ] = None,
    trust: Trust = False,
    form: Form = "text",
    as_json: AsJson = False,
) -> None:
    """Show what a configuration would run, its settings and where they come from, and its memory,
    time and cost.

    Without a file it reads ./retrain.toml. Any flag of the configuration may follow, such as --lr
    1e-4. The exit code is 2 if the configuration would be refused, and 3 if this machine lacks what
    it needs.
    """
    from retrain.config import load_config
    from retrain.config.overrides import parse_overrides

    overrides = parse_overrides(context.args)
    if len(overrides.rest) > 1:
        raise ConfigurationError(
            f"retrain explain takes one file; {overrides.rest[1]!r} is one too many."
        )
    _check_range("price-per-hour", price_per_hour)
    _check_range("memory-gib", memory_gib)
    if pilot and probe:
        raise ConfigurationError(
            "--pilot and --probe both give the step time; leave one of them out."
        )
    load_dotenv()
    config = load_config(Path(overrides.rest[0]) if overrides.rest else None, overrides)
    from retrain.explain import explain
    from retrain.explain.text import to_text
    from retrain.records.jsonl import finite
    from retrain.records.redact import Redactor
    from retrain.records.run_folder import refuse_foreign_code
    from retrain.records.terminal import clean

    if not trust:
        refuse_foreign_code(config, "explaining it")
    seen = explain(
        config,
        pilot=pilot,
        probe=probe,
        price_per_hour=price_per_hour,
        memory_gib=memory_gib,
        say=print_progress,
    )
    if as_json or form == "json":
        text = json.dumps(finite(seen.to_json()), indent=2) + "\n"
    else:
        text = to_text(seen)
    sys.stdout.write(clean(Redactor().text(text)))
    if seen.refused or seen.unavailable:
        raise typer.Exit(
            ConfigurationError.exit_code if seen.refused else EnvironmentFailure.exit_code
        )


def _check_range(name: str, value: float | None) -> None:
    """Raise ConfigurationError for a value that is not below _MAX; NaN is not."""
    if value is not None and not value < _MAX:
        raise ConfigurationError(
            f"--{name} {value:g} is out of range; give a number from 0 to {_MAX:,}."
        )

"""`retrain explain [FILE]`: what a configuration would do, and its memory, time and cost."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from retrain.cli.shared import (
    FLAGS_FOLLOW,
    Form,
    Trust,
    flags_after,
    load_dotenv,
    load_named,
    print_json,
    print_masked,
    print_progress,
)
from retrain.errors import ConfigurationError, EnvironmentFailure

SETTINGS = FLAGS_FOLLOW | {"options_metavar": "[FILE] [OPTIONS] [--KEY VALUE]..."}
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
        typer.Option(min=0.1, help="Predict for a device of this size, whether it is here or not."),
    ] = None,
    trust: Trust = False,
    form: Form = "text",
) -> None:
    """Show what a configuration would run, its settings and where they come from, and its memory,
    time and cost.

    Without a file it reads ./retrain.toml. Any flag of the configuration may follow, such as --lr
    1e-4. The exit code is 2 if retrain would refuse the configuration, and 3 if this machine lacks
    what it needs.
    """
    overrides = flags_after(context, "explain takes one file", 1)
    # NaN is not below the limit either.
    for name, value in (("price-per-hour", price_per_hour), ("memory-gib", memory_gib)):
        if not (value or 0) < _MAX:
            raise ConfigurationError(
                f"--{name} {value:g} is out of range; give a number from 0 to {_MAX:,}."
            )
    if pilot and probe:
        raise ConfigurationError("--pilot and --probe both give the step time; leave one out.")
    load_dotenv()
    from retrain.cli.run import continued

    config = (continued(overrides.rest, overrides) or [load_named(overrides)])[0]
    from retrain.explain import explain
    from retrain.explain.text import to_text
    from retrain.records.run_folder import refuse_foreign_code

    if not trust:
        refuse_foreign_code(config, "explaining it")
    with redirect_stdout(sys.stderr):  # The result must not contain the output of plugins.
        seen = explain(
            config,
            pilot=pilot,
            probe=probe,
            price_per_hour=price_per_hour,
            memory_gib=memory_gib,
            say=print_progress,
        )
    if form == "json":
        print_json(seen.to_json())
    else:
        print_masked(to_text(seen))
    if seen.refused:
        raise typer.Exit(ConfigurationError.exit_code)
    if seen.unavailable:
        raise typer.Exit(EnvironmentFailure.exit_code)

"""`retrain audit CONFIG`: how often the configured reward errs, and how long it takes."""

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
    print_json,
    print_masked,
    print_progress,
)
from retrain.errors import ConfigurationError, RunFailed

SETTINGS = FLAGS_FOLLOW


def command(
    context: typer.Context,
    target: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG", help="A configuration; its [reward] and [data] are used, no model."
        ),
    ],
    examples: Annotated[
        int, typer.Option(min=1, help="Number of examples, spread over the training set.")
    ] = 200,
    trust: Trust = False,
    form: Form = "text",
) -> None:
    """Run the reward on answers whose verdict is known.

    These are families of answers that people and models write, right and wrong, and the reference
    answers of [data]. Any flag of the configuration may follow, such as --reward-type math.
    """
    from retrain.config import load_config

    overrides = flags_after(context, "audit takes one configuration")
    if not target.is_file():
        raise ConfigurationError(
            f"{target} is not a file; name a configuration with a [reward] and [data]."
        )
    load_dotenv()
    config = load_config(target, overrides)
    # Import after the configuration, so that a mistake in it shows before seconds of imports.
    from retrain.audit.run import audit_reward, to_text
    from retrain.records.run_folder import refuse_foreign_code

    if not trust:
        refuse_foreign_code(config, "its audit")
    with redirect_stdout(sys.stderr):  # The result must not contain the output of plugins.
        audit = audit_reward(config, examples, print_progress)
    if form == "json":
        print_json(audit.to_json())
    else:
        print_masked(to_text(audit))
    if audit.could_not_judge == len(audit.verdicts):
        raise RunFailed(
            "The reward could judge none of the completions"
            f" ({audit.verdicts[0].score.reason.rstrip('.')}), so no rate is known;"
            " correct the reward."
        )

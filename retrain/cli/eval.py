"""`retrain eval RUN|CONFIG`: held-out pass@1 and pass@k of a run's checkpoint, or of the model that
a configuration names.
"""

import json
import sys
from contextlib import closing, redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from retrain.cli.shared import (
    FLAGS_FOLLOW,
    Checkpoint,
    Form,
    Trust,
    flags_after,
    load_dotenv,
)
from retrain.errors import ConfigurationError

SETTINGS = FLAGS_FOLLOW


def command(
    context: typer.Context,
    target: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|CONFIG", help="A run's folder, or a configuration for its untrained model."
        ),
    ],
    checkpoint: Checkpoint = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the answers; by default evaluations/ in the run's folder, or in logs/."
        ),
    ] = None,
    trust: Trust = False,
    form: Form = "text",
) -> None:
    """Evaluate a run's checkpoint, or the untrained model of a configuration, on held-out problems:
    pass@1 and pass@k.

    Any flag of the configuration may follow, such as --evaluation-max-examples 50.
    """
    overrides = flags_after(context, "eval takes one run or configuration")
    if not target.exists():
        raise ConfigurationError(
            f"{target} does not exist; name a run's folder or a configuration."
        )
    load_dotenv()
    from retrain.records.evaluation import EvaluationFolder
    from retrain.records.jsonl import finite
    from retrain.records.terminal import clean
    from retrain.run.evaluate import evaluate_run
    from retrain.tracking.console import Console
    from retrain.tracking.lines import lines_of

    folder = EvaluationFolder.new(output, target)
    # Standard output is for the result, also where a plugin prints.
    with redirect_stdout(sys.stderr), closing(Console()) as console:
        result = evaluate_run(
            target,
            checkpoint=checkpoint,
            overrides=overrides,
            log=console.message,
            trust=trust,
            keep=folder.write,
        )
    if form == "json":
        print(json.dumps(finite(result.summary() | {"folder": str(folder.path)})))
    else:
        print(clean("\n".join([*lines_of(result, folder.path), f"Answers: {folder.path}"])))

"""`retrain eval RUN|CONFIG`: held-out pass@1 and pass@k of a run's checkpoint, or of the model that
a configuration names.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from retrain.cli.shared import AsJson, Form, load_dotenv, print_progress
from retrain.errors import ConfigurationError

SETTINGS = {"context_settings": {"allow_extra_args": True, "ignore_unknown_options": True}}
"""The configuration's flags are left to its own parser."""


def command(
    context: typer.Context,
    target: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|CONFIG", help="A run's folder, or a configuration for its untrained model."
        ),
    ],
    checkpoint: Annotated[
        int | None,
        typer.Option(help="The checkpoint after this many steps; by default the newest."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the answers; by default evaluations/ in the run's folder, or in logs/."
        ),
    ] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Run the Python code that the run's folder names.")
    ] = False,
    form: Form = "text",
    as_json: AsJson = False,
) -> None:
    """Evaluate a run's checkpoint, or the untrained model of a configuration, on held-out problems:
    pass@1 and pass@k.

    Any flag of the configuration may follow, such as --evaluation-max-examples 50.
    """
    from retrain.config.overrides import parse_overrides

    overrides = parse_overrides(context.args)
    if overrides.rest:
        raise ConfigurationError(
            f"retrain eval takes one run or configuration; {overrides.rest[0]!r} is one too many."
        )
    if not target.exists():
        raise ConfigurationError(
            f"{target} does not exist; name a run's folder or a configuration."
        )
    load_dotenv()
    from retrain.records.evaluation import EvaluationFolder
    from retrain.records.jsonl import finite
    from retrain.records.terminal import clean
    from retrain.run.evaluate import evaluate_run
    from retrain.tracking.lines import evaluation_line, task_lines

    folder = EvaluationFolder.new(output, target)
    result = evaluate_run(
        target,
        checkpoint=checkpoint,
        overrides=overrides,
        say=print_progress,
        trust=trust,
        keep=folder.write,
    )
    if as_json or form == "json":
        print(json.dumps(finite(result.summary() | {"folder": str(folder.path)})))
    else:
        print(
            clean(
                "\n".join([evaluation_line(result), *task_lines(result), f"Answers: {folder.path}"])
            )
        )

"""`retrain audit CONFIG`: how often the configured reward errs, and how long it takes."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from retrain.cli.shared import AsJson, Form, Trust, load_dotenv, print_progress
from retrain.errors import ConfigurationError

SETTINGS = {"context_settings": {"allow_extra_args": True, "ignore_unknown_options": True}}
"""The configuration's flags are left to its own parser."""


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
    output: Annotated[
        Path | None, typer.Option(help="Write a page in the style of `retrain report`.")
    ] = None,
    trust: Trust = False,
    form: Form = "text",
    as_json: AsJson = False,
) -> None:
    """Run the reward on answers whose verdict is known.

    These are gold answers, the same answers in other forms, near misses, empty, truncated and
    hostile completions. Any flag of the configuration may follow, such as --reward-type math.
    """
    from retrain.config import load_config
    from retrain.config.overrides import parse_overrides

    overrides = parse_overrides(context.args)
    if overrides.rest:
        raise ConfigurationError(
            f"retrain audit takes one configuration; {overrides.rest[0]!r} is one too many."
        )
    if not target.is_file():
        raise ConfigurationError(
            f"{target} is not a file; name a configuration, whose [reward] is audited on its"
            " [data]."
        )
    load_dotenv()
    config = load_config(target, overrides)
    from retrain.audit.run import audit_reward
    from retrain.audit.text import to_text
    from retrain.records.jsonl import finite
    from retrain.records.redact import Redactor
    from retrain.records.run_folder import refuse_foreign_code
    from retrain.records.terminal import clean

    if not trust:
        refuse_foreign_code(config, "its audit")
    audit = audit_reward(config, examples, print_progress)
    if output is not None:
        from retrain.report.page import write_audit_page

        write_audit_page(audit, output)
        print_progress(f"Page: {output}")
    if as_json or form == "json":
        text = json.dumps(finite(audit.to_json()), indent=2) + "\n"
    else:
        text = to_text(audit)
    sys.stdout.write(clean(Redactor().text(text)))

"""`retrain xray`: which objective an advantage optimizes, and how noisily."""

import sys
from contextlib import redirect_stdout
from typing import Annotated

import typer

from retrain.cli.shared import Form, Trust, load_dotenv, print_json
from retrain.errors import ConfigurationError


def command(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG|NAME",
            help="TOML files, advantages such as maxrl, algorithms such as dapo, or plugins such as"
            " my_module.my_advantage.",
        ),
    ],
    group: Annotated[
        int | None, typer.Option(help="Completions per prompt; by default the file's, or 16.")
    ] = None,
    trust: Trust = False,
    form: Form = "text",
) -> None:
    """Show the objective of an algorithm before any run: how much a prompt counts at each pass
    rate, and the noise relative to the signal. Exact for right-or-wrong rewards, on policy.
    """
    from retrain.xray.binary import MAX_GROUP, RATES
    from retrain.xray.resolve import read_xray
    from retrain.xray.text import text_lines

    load_dotenv()
    if group is not None and not 2 <= group <= MAX_GROUP:
        raise ConfigurationError(
            f"--group {group} is out of range; give 2 to {MAX_GROUP} completions per prompt."
        )
    # The result must not contain the output of a plugin.
    with redirect_stdout(sys.stderr):
        found = []
        for name in names:
            found += read_xray(name, group, trust=trust)
    if form == "json":
        rows = [
            {
                "name": one.name,
                "group": one.group,
                "rates": list(RATES),
                "weight": one.weight(RATES).tolist(),
                "objective": one.objective(RATES).tolist(),
                "noise": one.noise(RATES).tolist(),
                "coefficients": one.coefficients.tolist(),
                "uniform": dict(zip(("all_wrong", "all_right"), one.uniform, strict=True)),
            }
            for one in found
        ]
        print_json({"xrays": rows})
        return
    print("\n".join(text_lines(found)))

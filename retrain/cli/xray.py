"""`retrain xray`: what objective an advantage climbs, and how noisily."""

import sys
from contextlib import redirect_stdout
from typing import Annotated

import typer

from retrain.cli.shared import JsonOnly, Trust, load_dotenv, print_json
from retrain.errors import ConfigurationError


def command(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG|NAME...",
            help="TOML files, advantages such as maxrl, algorithms such as dapo, or plugins such as"
            " my_module.my_advantage.",
        ),
    ],
    group: Annotated[
        int | None, typer.Option(help="Completions per prompt; by default the file's, or 16.")
    ] = None,
    aggregation: Annotated[
        str | None, typer.Option(help="[loss] aggregation in place of the file's.")
    ] = None,
    wrong_length: Annotated[
        float, typer.Option(help="Length of a wrong completion over a right one's.")
    ] = 1.0,
    trust: Trust = False,
    as_json: JsonOnly = False,
) -> None:
    """Show what an algorithm climbs, before any run: how much a prompt counts by its pass rate, the
    objective, and the noise beside the signal. Exact for right-or-wrong rewards, on policy.
    """
    from retrain.xray.binary import RATES
    from retrain.xray.resolve import read_xray
    from retrain.xray.text import text_lines

    load_dotenv()
    _check(group, aggregation, wrong_length)
    # What a plugin prints is no part of the result.
    with redirect_stdout(sys.stderr):
        found = []
        for name in names:
            found += read_xray(name, group, aggregation, wrong_length, trust=trust)
    if as_json:
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


def _check(group: int | None, aggregation: str | None, wrong_length: float) -> None:
    """Raises ConfigurationError for a flag out of its range."""
    from retrain.backends.losses import AGGREGATIONS
    from retrain.xray.binary import MAX_GROUP

    if group is not None and not 2 <= group <= MAX_GROUP:
        raise ConfigurationError(
            f"--group {group} is out of range; give 2 to {MAX_GROUP} completions per prompt."
        )
    if aggregation not in (None, *AGGREGATIONS):
        raise ConfigurationError(
            f"--aggregation {aggregation} is not known to an X-ray; allowed are"
            f" {', '.join(AGGREGATIONS)}."
        )
    if not 0 < wrong_length < float("inf"):
        raise ConfigurationError(
            f"--wrong-length {wrong_length:g} is not a positive number; 2 says that wrong"
            " completions are twice as long as right ones."
        )

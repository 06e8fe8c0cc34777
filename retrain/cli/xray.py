"""`retrain xray`: what objective an advantage climbs, and how noisily."""

import sys
from contextlib import redirect_stdout
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from retrain.cli.shared import Figure, JsonOnly, Trust, check_figure, load_dotenv, print_json
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
    figure: Figure = None,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="Sum the gradient over all groups of a policy that can be counted; takes losses"
            " too, such as ppo or my_module.my_loss.",
        ),
    ] = False,
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
    _check(group, aggregation, wrong_length, figure)
    if exact:
        if aggregation or figure or wrong_length != 1:
            raise ConfigurationError(
                "--exact counts answers of equal length and draws nothing; leave --aggregation,"
                " --wrong-length and --figure out."
            )
        _print_exact(names, group, trust=trust, as_json=as_json)
        return
    # What a plugin prints is no part of the result.
    with redirect_stdout(sys.stderr):
        found = []
        for name in names:
            found += read_xray(name, group, aggregation, wrong_length, trust=trust)
    if figure:
        from retrain.xray.figure import write_figure

        write_figure(figure, found)
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
    if figure:
        print(f"Figure: {figure}")


def _print_exact(names: list[str], group: int | None, *, trust: bool, as_json: bool) -> None:
    from retrain.xray.resolve import read_exact

    with redirect_stdout(sys.stderr):
        found = list(chain.from_iterable(read_exact(name, group, trust=trust) for name in names))
    if as_json:
        print_json({"exact": [one.to_json() for one in found]})
        return
    print("Expected gradients over all groups of two-token answers, beside the pass rate's (p).")
    for one in found:
        print(f"{one.name} (G = {one.group}): {one.sentence()}")


def _check(
    group: int | None, aggregation: str | None, wrong_length: float, figure: Path | None
) -> None:
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
    check_figure(figure)

"""`retrain contrast`: the gradients of several algorithms on the same rollouts."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from retrain.cli.shared import (
    AsJson,
    Figure,
    Trust,
    check_figure,
    load_dotenv,
    print_json,
    print_masked,
    print_progress,
)


def command(
    target: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|CONFIG",
            help="A run's folder, or a configuration for its untrained model; a campaign's file"
            " brings its arms.",
        ),
    ],
    arms: Annotated[
        Path | None,
        typer.Option(
            help="TOML file of conditions, or a campaign's file; the first is the baseline."
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(
            min=0, help="Weights after so many steps; by default the newest checkpoint's."
        ),
    ] = None,
    prompts: Annotated[
        int | None,
        typer.Option(min=2, help="Draw a batch of so many prompts, in place of the run's own."),
    ] = None,
    figure: Figure = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Show what several algorithms would do with the same rollouts: how their gradients differ, and
    how far one agrees with itself. It warns of a campaign that cannot decide; it never decides.
    """
    from retrain.contrast.batch import (
        load_base,
        opened,
        planned_seeds,
        read_arms,
        reads_texts,
        refuse_too_many,
        take_batch,
    )
    from retrain.contrast.gradients import contrast
    from retrain.contrast.text import text_lines

    load_dotenv()
    check_figure(figure)
    # What a plugin prints is no part of the result.
    with redirect_stdout(sys.stderr):
        base = load_base(target, trust)
        chosen = read_arms(base, arms, trust=trust, say=print_progress)
        config = base
        # A campaign is no run to sample with; its first arm is.
        if base.campaign:
            config = chosen[0].config
        refuse_too_many(config, prompts)
        with opened(target, config, step, print_progress) as (parts, backend, state):
            batch = take_batch(
                target, parts, state, prompts=prompts, texts=reads_texts(chosen), say=print_progress
            )
            seeds = planned_seeds(base, target)
            found = contrast(parts, backend, batch, chosen, seeds, print_progress)
    if figure:
        from retrain.contrast.figure import write_figure

        write_figure(figure, found)
    if as_json:
        print_json(found.to_json())
        return
    print_masked("\n".join(text_lines(found)))
    if figure:
        print(f"Figure: {figure}")

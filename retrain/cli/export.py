"""`retrain export RUN`: the adapter or the model as other programs load it."""

from pathlib import Path
from typing import Annotated

import typer

from retrain.cli.shared import Checkpoint, load_dotenv, print_progress


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    merged: Annotated[
        bool, typer.Option("--merged", help="Write a whole model with the adapter merged in.")
    ] = False,
    hub: Annotated[
        str, typer.Option(metavar="NAME", help="Upload it to this repository, such as me/my-model.")
    ] = "",
    output: Annotated[
        Path | None,
        typer.Option(
            help="New folder; by default RUN-adapter, RUN-merged or RUN-model next to the run."
        ),
    ] = None,
    checkpoint: Checkpoint = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Run the Python code of a model that has its own.")
    ] = False,
) -> None:
    """Write the trained adapter as peft and vLLM load it, or a merged or wholly trained model, with
    its tokenizer and a model card.

    The card has the settings, the held-out figures with their intervals, and the command that
    trains it again. A repository that --hub makes is private.
    """
    load_dotenv()
    from retrain.records.terminal import clean
    from retrain.squeeze.export import check_hub, export_run, push

    if hub:
        check_hub(hub)
    exported = export_run(
        run,
        output,
        checkpoint=checkpoint,
        merged=merged,
        uploads=bool(hub),
        trust=trust,
        log=print_progress,
    )
    print(clean(f"{exported.what}: {exported.folder}"))
    if exported.is_local and exported.what == "Adapter":
        print(
            clean(
                f"Its base is a folder of this machine, {exported.base}; with --merged it loads on"
                " any other."
            )
        )
    if hub:
        print(f"Uploaded: {push(exported, hub)}")

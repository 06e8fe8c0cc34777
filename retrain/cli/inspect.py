"""`retrain inspect RUN`: the credit of every token of a step, in color or as a table, under one or
more transforms.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from retrain.cli.shared import Form, Trust
from retrain.errors import ConfigurationError
from retrain.inspect import Quantity

if TYPE_CHECKING:
    from retrain.inspect.credit import StepCredit


def command(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="A run's folder."),
    ],
    step: Annotated[
        int | None, typer.Option(help="The step; by default the last one stored.")
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=(
                "Another transform on the same completions, such as gtpo_hicra or grpo+gtpo;"
                " you may repeat it."
            ),
        ),
    ] = None,
    prompt: Annotated[
        int | None,
        typer.Option(help="Position of the prompt in the step; by default one with advantages."),
    ] = None,
    sample: Annotated[
        int | None, typer.Option(help="One completion of the prompt; by default all.")
    ] = None,
    by: Annotated[Quantity, typer.Option(help="Color of a token.")] = Quantity.ADVANTAGE,
    detectors: Annotated[
        bool,
        typer.Option("--detectors", help="Show the masks of both planning detectors side by side."),
    ] = False,
    planning_model: Annotated[
        str, typer.Option(help="With --detectors: the sentence encoder, instead of the run's own.")
    ] = "",
    table: Annotated[
        bool,
        typer.Option("--table", help="One line per token; the default without color."),
    ] = False,
    trust: Trust = False,
    form: Form = "text",
) -> None:
    """Show the credit of single tokens: advantage after each stage, surprisal, entropy, planning
    mask, log-ratio.
    """
    from rich.console import Console

    from retrain.analysis.runs import stored_run
    from retrain.inspect.credit import read_step
    from retrain.inspect.terminal import show

    credit = read_step(
        stored_run(run).check(),
        step,
        against or [],
        detectors=detectors,
        planning_model=planning_model,
        trust=trust,
    )
    numbers = _chosen(credit, prompt, sample)
    if form == "json":
        print(json.dumps(to_json(credit, numbers)))
        return
    console = Console()
    # Sixteen colors have no shades, and the shade of a token is its amount.
    shades = not console.no_color and console.color_system in ("256", "truecolor")
    # Rich itself would end with 1 where a reader such as `head` has seen enough.
    with console.capture() as text:
        show(credit, numbers, by, console, table=table or not shades)
    print(text.get(), end="")


def _chosen(credit: "StepCredit", prompt: int | None, sample: int | None) -> list[int]:
    slot = credit.liveliest_slot() if prompt is None else prompt
    numbers = credit.of_slot(slot)
    if not numbers:
        raise ConfigurationError(
            f"--prompt {slot} has no judged completion in step {credit.step}; its prompts are"
            f" {_list(credit.slots)}."
        )
    if sample is None:
        return numbers
    chosen = [number for number in numbers if credit.table.sample[number] == sample]
    if not chosen:
        samples = [int(credit.table.sample[number]) for number in numbers]
        raise ConfigurationError(
            f"--sample {sample} is none of prompt {slot} in step {credit.step}; its samples are"
            f" {_list(samples)}."
        )
    return chosen


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:12])) + (", ..." if len(numbers) > 12 else "")


def to_json(credit: "StepCredit", numbers: list[int]) -> dict[str, Any]:
    """Return the completions `numbers` with one list entry per token; unknown values are null."""
    completions = []
    for number in numbers:
        completion = credit.completion(number)
        optional = {
            "entropy": completion.entropies,
            "planning": completion.planning,
            "log_ratio": completion.log_ratios,
            "kept": completion.kept,
        }
        completions.append(
            {
                "prompt": completion.slot,
                "sample": completion.sample,
                "reward": completion.reward,
                "truncated": completion.truncated,
                "token_ids": completion.token_ids.tolist(),
                "text": completion.pieces,
                "turns": [
                    {"start": turn.start, "context": turn.context, "restarts": turn.restarts}
                    for turn in completion.turns
                ],
                "surprisal": completion.surprisals.tolist(),
                **{
                    name: None if values is None else values.tolist()
                    for name, values in optional.items()
                },
                "detectors": {name: mask.tolist() for name, mask in completion.detectors.items()},
                "advantages": {
                    label: {stage: values.tolist() for stage, values in stages.items()}
                    for label, stages in completion.stages.items()
                },
            }
        )
    return {
        "step": credit.step,
        "conditions": credit.labels,
        "notes": list(credit.notes),
        "completions": completions,
    }

"""`retrain compare CAMPAIGN_DIR` and `retrain compare RUN... --baseline RUN...`: which conditions
differ, as far as the seeds can tell.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer.core import TyperCommand

from retrain.cli.shared import (
    FORM_HELP,
    Alpha,
    Contrast,
    Control,
    LowerIsBetter,
    Margin,
    pair_of,
    print_json,
    refuse_two_baselines,
)
from retrain.errors import ConfigurationError

if TYPE_CHECKING:
    from retrain.analysis.budget import Budget
    from retrain.analysis.compare import Comparison
    from retrain.analysis.verdict import TestSettings


Format = Literal["text", "markdown", "json"]


class BaselineTakesSeveral(TyperCommand):
    """`--baseline A B C` is three baselines, so that a shell's pattern can follow it; runs to
    compare come before it.
    """

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # typer.Context is what typer passes
        return super().parse_args(ctx, repeated(args, "--baseline"))


def repeated(arguments: Sequence[str], flag: str) -> list[str]:
    """Repeat the flag before each of the values that follow it: [--baseline, a, b] -> [--baseline,
    a, --baseline, b].
    """
    result: list[str] = []
    values = None  # Count since the flag; None after another flag or at the start.
    for argument in arguments:
        if argument.startswith("-"):
            values = 0 if argument == flag else None
        elif values is not None:
            values += 1
        result += [flag, argument] if values is not None and values > 1 else [argument]
    return result


SETTINGS = {"cls": BaselineTakesSeveral}


def command(
    targets: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="A campaign's folder, or folders of runs."),
    ],
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LABEL | RUN...",
            help="A campaign's condition (the first unless given), or the baseline's runs.",
        ),
    ] = None,
    control: Control = False,
    metric: Annotated[
        str | None,
        typer.Option(
            help=(
                "pass@K, correct_rate, auc, or a column of metrics.jsonl; by default held-out"
                " pass@1, if there is one."
            )
        ),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(metavar="tokens=N", help="Compare the runs where they had sampled N tokens."),
    ] = None,
    alpha: Alpha = 0.05,
    margin: Margin = None,
    effect: Annotated[
        float | None,
        typer.Option(help="Show how many seeds would find this difference, such as 0.02."),
    ] = None,
    power: Annotated[
        float, typer.Option(help="Power for the detectable difference and the seeds needed.")
    ] = 0.8,
    lower_is_better: LowerIsBetter = False,
    contrast: Contrast = None,
    form: Annotated[Format, typer.Option("--format", "--json", help=FORM_HELP)] = "text",
) -> None:
    """Compare conditions across seeds: paired differences, intervals, exact p values adjusted over
    all of them, and a verdict.
    """
    from retrain.analysis.budget import Budget
    from retrain.analysis.verdict import TestSettings
    from retrain.records.evaluation import is_evaluation

    evaluated = next(filter(is_evaluation, targets), None)
    if evaluated:
        raise ConfigurationError(
            f"{evaluated} is one evaluation, and comparing two of them left in 0.10; compare runs"
            " of several seeds, or read both intervals in summary.json."
        )
    test = TestSettings(alpha, margin, effect, power, lower_is_better)
    budget = Budget.parse(at) if at is not None else None
    pairs = [pair_of(text) for text in contrast or []]
    comparison = _compare(targets, baseline or [], control, metric, test, pairs, budget)
    _print(comparison, form)


def _print(comparison: "Comparison", form: Format) -> None:
    from retrain.analysis.comparison_text import to_json, to_markdown, to_text
    from retrain.records.terminal import clean

    if form == "json":
        print_json(to_json(comparison))
    elif form == "markdown":
        print(clean(to_markdown(comparison)), end="")
    else:
        print(clean(to_text(comparison, shutil.get_terminal_size().columns)), end="")


def _compare(
    targets: list[Path],
    baseline: list[str],
    control: bool,
    metric: str | None,
    test: "TestSettings",
    pairs: list[tuple[str, str]],
    budget: "Budget | None",
) -> "Comparison":
    from retrain.analysis.compare import compare_campaign, compare_runs
    from retrain.analysis.runs import is_campaign, no_campaign, stored_run

    first = baseline[0] if baseline else None
    refuse_two_baselines(control, first)
    for target in targets:
        if not target.is_dir():
            raise ConfigurationError(
                f"{target} is not a folder; name a campaign's folder, or runs and --baseline runs."
            )
    campaigns = [target for target in targets if is_campaign(target)]
    if campaigns:
        if len(targets) > 1 or len(baseline) > 1:
            raise ConfigurationError(
                f"{campaigns[0]} is a campaign; name one campaign at a time, with one condition"
                " as --baseline."
            )
        return compare_campaign(
            campaigns[0], test, first, metric, control=control, pairs=pairs, budget=budget
        )
    if pairs:
        raise ConfigurationError(
            f"--contrast {':'.join(pairs[0])} names conditions of a campaign, and {targets[0]} is"
            " none."
        )
    if not baseline:
        needs = (
            "--control takes a campaign"
            if control
            else "runs need --baseline RUN... for a comparison"
        )
        raise ConfigurationError(f"{no_campaign(targets[0])}, and {needs}.")
    return compare_runs(
        [stored_run(target) for target in targets],
        [stored_run(Path(run)) for run in baseline],
        test,
        metric,
        budget,
    )

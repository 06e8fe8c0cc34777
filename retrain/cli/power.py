"""`retrain power`: how many seeds a difference needs, and how small a difference a number of seeds
can find.
"""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from retrain.cli.shared import Alpha, Form, print_json
from retrain.errors import ConfigurationError

if TYPE_CHECKING:
    from retrain.analysis.pilot import Pilot, SeedPlan, Spread


def command(
    pilot: Annotated[
        Path | None,
        typer.Argument(metavar="PILOT_DIR", help="A campaign or runs that show the spread."),
    ] = None,
    effect: Annotated[
        float | None,
        typer.Option(help="The difference to find; for rates a fraction, such as 0.02."),
    ] = None,
    sd: Annotated[
        float | None,
        typer.Option(
            help="Standard deviation of the differences between two arms, instead of a pilot."
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(help="The pilot's pass@K, correct_rate, auc, or a column of metrics.jsonl."),
    ] = None,
    comparisons: Annotated[
        int | None,
        typer.Option(help="Conditions besides the baseline; by default the pilot's, or 1."),
    ] = None,
    alpha: Alpha = 0.05,
    power: Annotated[float, typer.Option(help="Probability of finding the difference.")] = 0.8,
    form: Form = "text",
) -> None:
    """Plan a campaign: the seeds needed to find a difference, given a pilot or a standard
    deviation.
    """
    from retrain.analysis.pilot import SeedPlan, read_pilot
    from retrain.analysis.power import Rule

    if (pilot is None) == (sd is None):
        raise ConfigurationError(
            "retrain power needs the spread of the differences; give a pilot's folder, or --sd."
        )
    found = read_pilot(pilot, metric) if pilot else None
    if found and found.sd == 0:
        raise ConfigurationError(
            f"the differences between the runs of {pilot} are all equal, so they show no spread;"
            " give --sd, or run a pilot of more seeds."
        )
    spread = found.sd if found else sd
    assert spread is not None
    shown = found.comparisons if found else 1
    plan = SeedPlan(effect, spread, Rule(comparisons or shown, alpha, power))
    _check(plan, comparisons, found)
    if form == "json":
        print_json(_as_json(plan, found))
    else:
        print("\n".join(_lines(plan, found)))


def _check(plan: "SeedPlan", comparisons: int | None, pilot: "Pilot | None") -> None:
    """Raise ConfigurationError for a value outside its range."""
    from retrain.analysis.selection import check_levels

    check_levels(plan.rule.alpha, plan.rule.power)
    if plan.effect == 0:
        raise ConfigurationError(
            "--effect 0 needs infinitely many seeds; give the smallest difference that matters,"
            " such as 0.02."
        )
    for name, size in (("effect", plan.effect), ("sd", plan.sd)):
        if size is not None and not 0 < size < float("inf"):
            raise ConfigurationError(
                f"--{name} {size:g} is not a positive number; give one, such as 0.02."
            )
    if comparisons is not None and comparisons < 1:
        raise ConfigurationError(
            f"--comparisons {comparisons} is not a number of comparisons; give 1 or more."
        )
    if pilot and pilot.metric.is_rate and plan.effect is not None and plan.effect >= 1:
        raise ConfigurationError(
            f"--effect {plan.effect:g} is not a possible difference in {pilot.metric.name}; two"
            " points are 0.02."
        )


def _lines(plan: "SeedPlan", pilot: "Pilot | None") -> Iterator[str]:
    from retrain.records.terminal import counted, table_lines

    rule = plan.rule
    yield (
        f"Paired by seed, two-sided, alpha {rule.alpha:g} over"
        f" {counted(rule.comparisons, 'comparison')}, power {100 * rule.power:g}%."
    )
    if pilot:
        yield from _pilot_lines(pilot)
    else:
        yield f"Sd of the differences: {_number(plan.sd)}, as given."
    if plan.effect is not None:
        yield from _seed_lines(plan, pilot)
        if pilot and pilot.spread:
            yield _design_line(plan, pilot.spread)
    yield ""
    rows = [
        (str(seeds), "none" if effect is None else _number(effect))
        for seeds, effect in plan.detectable().items()
    ]
    yield from table_lines([("seeds", "detectable difference"), *rows], right=(0,))


def _pilot_lines(pilot: "Pilot") -> Iterator[str]:
    low, high = pilot.sd_interval
    yield f"Metric: {pilot.metric.description}."
    yield (
        f"Sd of the differences: {_number(pilot.sd)} (95% interval {_number(low)} to"
        f" {_number(high)}), from {pilot.source}."
    )
    if len(pilot.sd_by_contrast) > 1:
        sds = (f"{label} {_number(sd)}" for label, sd in pilot.sd_by_contrast.items())
        yield f"By contrast: {', '.join(sds)}."


def _design_line(plan: "SeedPlan", spread: "Spread") -> str:
    """Return seeds, problems and samples together, at the pilot's own spread."""
    from retrain.analysis.pilot import MAX_DESIGN_SEEDS
    from retrain.records.terminal import counted

    luck = (
        f"Noise from the seeds alone: sd {_number(spread.luck**0.5)}, which no evaluation reduces"
    )
    found = plan.cheapest(spread)
    if not found:
        return (
            f"{luck}; no design of at most {MAX_DESIGN_SEEDS} seeds finds"
            f" {_number(plan.effect or 0.0)}."
        )
    return (
        f"{luck}. The cheapest design at the pilot's spread and speed: {found.seeds} seeds,"
        f" {found.problems:,} problems x {counted(found.samples, 'sample')}, {found.hours:.2g}"
        f" hours for all {plan.rule.comparisons + 1} conditions one after the other."
    )


def _seed_lines(plan: "SeedPlan", pilot: "Pilot | None") -> Iterator[str]:
    """Yield the assured number first: at the sd that a pilot shows, the true power often lies far
    below the stated power.
    """
    from retrain.analysis.pilot import ASSURANCE

    effect = _number(plan.effect or 0.0)
    if not pilot:
        yield f"You need {_count(plan.seeds(plan.sd))} seeds to find {effect}."
        return
    low, high = (_count(plan.seeds(sd)) for sd in pilot.sd_interval)
    yield (
        f"You need {_count(plan.seeds(pilot.assured_sd))} seeds to find {effect} (assumed sd"
        f" {_number(pilot.assured_sd)}, an upper bound that holds for {100 * ASSURANCE:g}% of"
        " pilots)."
    )
    yield (
        f"With the pilot's sd taken as exact: {_count(plan.seeds(plan.sd))} seeds ({low} to {high}"
        " over its interval). About half of such plans have less power than stated."
    )


def _count(seeds: int | None) -> str:
    from retrain.analysis.power import MAX_SEEDS

    if seeds is None:
        return f"more than {MAX_SEEDS:,}"
    return f"{seeds:,}"


def _number(value: float) -> str:
    return f"{value:.4g}"


def _as_json(plan: "SeedPlan", pilot: "Pilot | None") -> dict[str, Any]:
    wanted = plan.effect is not None
    cheapest = plan.cheapest(pilot.spread) if pilot and pilot.spread and wanted else None
    return {
        "effect": plan.effect,
        "sd": plan.sd,
        "sd_interval": pilot.sd_interval if pilot else None,
        "source": pilot.source if pilot else "given",
        "metric": pilot.metric.name if pilot else None,
        **asdict(plan.rule),
        "sd_by_contrast": dict(pilot.sd_by_contrast) if pilot else None,
        "sd_assured": pilot.assured_sd if pilot else None,
        "seeds_assured": plan.seeds(pilot.assured_sd) if pilot and wanted else None,
        "seeds_needed": plan.seeds(plan.sd) if wanted else None,
        "seeds_needed_interval": (
            [plan.seeds(sd) for sd in pilot.sd_interval] if pilot and wanted else None
        ),
        "detectable": {str(seeds): difference for seeds, difference in plan.detectable().items()},
        "cheapest": asdict(cheapest) if cheapest else None,
    }

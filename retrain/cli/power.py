"""`retrain power`: how many seeds a difference needs, and how small a difference a number of seeds
can find.
"""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from retrain.cli.shared import Alpha, Form, print_json
from retrain.errors import ConfigurationError

if TYPE_CHECKING:
    from retrain.analysis.pilot import Pilot, Spread
    from retrain.analysis.power import Rule
    from retrain.system import Json


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
    from retrain.analysis.pilot import read_pilot
    from retrain.analysis.power import Rule

    if (pilot is None) == (sd is None) or (metric and not pilot):
        raise ConfigurationError(
            "retrain power needs the spread of the differences; give a pilot's folder, or --sd"
            " alone. --metric needs the folder."
        )
    found = read_pilot(pilot, metric) if pilot else None
    if found and found.sd == 0:
        raise ConfigurationError(
            f"the differences between the runs of {pilot} are all equal, so they show no spread;"
            " give --sd, or run a pilot of more seeds."
        )
    rule = Rule(comparisons or (found.comparisons if found else 1), alpha, power)
    spread = found.sd if found else sd
    assert spread is not None
    _check(effect, spread, rule, comparisons, found)
    plan = _plan(effect, spread, rule, found)
    if form == "json":
        print_json(plan)
    else:
        print("\n".join(_lines(plan, found)))


def _check(
    effect: float | None, sd: float, rule: "Rule", comparisons: int | None, pilot: "Pilot | None"
) -> None:
    """Raise ConfigurationError for a value outside its range."""
    from retrain.analysis.compare import check_levels

    check_levels(rule.alpha, rule.power)
    if effect == 0:
        raise ConfigurationError(
            "--effect 0 needs infinitely many seeds; give the smallest difference that matters,"
            " such as 0.02."
        )
    for name, size in (("effect", effect), ("sd", sd)):
        if size is not None and not 0 < size < float("inf"):
            raise ConfigurationError(
                f"--{name} {size:g} is not a positive number; give one, such as 0.02."
            )
    if comparisons is not None and comparisons < 1:
        raise ConfigurationError(
            f"--comparisons {comparisons} is not a number of comparisons; give 1 or more."
        )
    if pilot and pilot.metric.is_rate and (effect or 0.0) >= 1:
        raise ConfigurationError(
            f"--effect {effect:g} is not a possible difference in {pilot.metric.name}; two"
            " points are 0.02."
        )


def _plan(effect: float | None, sd: float, rule: "Rule", pilot: "Pilot | None") -> "Json":
    """Return the numbers of a plan under the names of `--json`."""
    from retrain.analysis.pilot import cheapest
    from retrain.analysis.power import SEED_COUNTS, minimal_detectable_effect, seeds_needed

    found = {
        "effect": effect,
        "sd": sd,
        "sd_interval": pilot.sd_interval if pilot else None,
        "source": pilot.source if pilot else "given",
        "metric": pilot.metric.name if pilot else None,
        **asdict(rule),
        "sd_by_contrast": dict(pilot.sd_by_contrast) if pilot else None,
        "sd_assured": pilot.assured_sd if pilot else None,
        "seeds_assured": None,
        "seeds_needed": None,
        "seeds_needed_interval": None,
        "detectable": {
            str(seeds): minimal_detectable_effect(seeds, sd, rule) for seeds in SEED_COUNTS
        },
        "cheapest": None,
    }
    if effect:
        found["seeds_needed"] = seeds_needed(effect, sd, rule)
    if effect and pilot:
        found["seeds_assured"] = seeds_needed(effect, pilot.assured_sd, rule)
        found["seeds_needed_interval"] = [
            seeds_needed(effect, end, rule) for end in pilot.sd_interval
        ]
        design = cheapest(pilot.spread, effect, rule) if pilot.spread else None
        found["cheapest"] = design and asdict(design)
    return found


def _lines(plan: "Json", pilot: "Pilot | None") -> Iterator[str]:
    from retrain.records.terminal import counted, table_lines

    family = counted(plan["comparisons"], "comparison")
    yield (
        f"Paired by seed, two-sided, alpha {plan['alpha']:g} over {family}, power"
        f" {100 * plan['power']:g}%."
    )
    if pilot:
        yield from _pilot_lines(pilot)
    else:
        yield f"Sd of the differences: {_number(plan['sd'])}, as given."
    if plan["effect"]:
        yield from _seed_lines(plan, pilot)
        if pilot and pilot.spread:
            yield _design_line(plan, pilot.spread)
    yield ""
    rows = [
        (seeds, "none" if effect is None else _number(effect))
        for seeds, effect in plan["detectable"].items()
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


def _design_line(plan: "Json", spread: "Spread") -> str:
    """Return seeds, problems and samples together, at the pilot's own spread."""
    from retrain.analysis.pilot import MAX_DESIGN_SEEDS
    from retrain.records.terminal import counted

    luck = (
        f"Noise from the seeds alone: sd {_number(spread.luck**0.5)}, which no evaluation reduces"
    )
    found = plan["cheapest"]
    if not found:
        return (
            f"{luck}; no design of at most {MAX_DESIGN_SEEDS} seeds finds"
            f" {_number(plan['effect'])}."
        )
    return (
        f"{luck}. The cheapest design at the pilot's spread and speed: {found['seeds']} seeds,"
        f" {found['problems']:,} problems x {counted(found['samples'], 'sample')},"
        f" {found['hours']:.2g} hours for all {plan['comparisons'] + 1} conditions one after the"
        " other."
    )


def _seed_lines(plan: "Json", pilot: "Pilot | None") -> Iterator[str]:
    """Yield the assured number first: at the sd that a pilot shows, the true power often lies far
    below the stated power.
    """
    from retrain.analysis.pilot import ASSURANCE

    effect, needed = _number(plan["effect"]), _count(plan["seeds_needed"])
    if not pilot:
        yield f"You need {needed} seeds to find {effect}."
        return
    low, high = map(_count, plan["seeds_needed_interval"])
    yield (
        f"You need {_count(plan['seeds_assured'])} seeds to find {effect} (assumed sd"
        f" {_number(pilot.assured_sd)}, an upper bound that holds for {100 * ASSURANCE:g}% of"
        " pilots)."
    )
    yield (
        f"With the pilot's sd taken as exact: {needed} seeds ({low} to {high} over its interval)."
        " About half of such plans have less power than stated."
    )


def _count(seeds: int | None) -> str:
    from retrain.analysis.power import MAX_SEEDS

    return f"more than {MAX_SEEDS:,}" if seeds is None else f"{seeds:,}"


def _number(value: float) -> str:
    return f"{value:.4g}"

"""Checks and notes before a campaign's first run: once for all runs, or with the conditions that
they concern.
"""

from contextlib import closing
from dataclasses import dataclass, replace

from retrain.backends.declared import incapable
from retrain.campaign.plan import CampaignPlan
from retrain.config import TrainConfig, replaced
from retrain.data.prompts import load_examples
from retrain.data.sources import NoHeldOutSplit
from retrain.environments.loading import environment_name, load_environment, load_problems
from retrain.errors import ConfigurationError
from retrain.run.notes import notes, preflight_lines
from retrain.run.parts import check_plugins


@dataclass(frozen=True)
class Checked:
    """The findings of the checks."""

    lines: tuple[str, ...]
    """Sentences to print before the first run."""
    without_held_out: frozenset[str]
    """Conditions whose data source has no held-out split, so that the default evaluation at the end
    is left out."""


def check(plan: CampaignPlan) -> Checked:
    """Check what all runs need. Raises ConfigurationError if a run could not start; NoHeldOutSplit
    if an evaluation was asked for that has no held-out split.
    """
    about_runs = notes(plan.config)
    lines = [line for line in preflight_lines(plan.config) if line not in about_runs]
    # before any data, so that a plugin's wrong name is said at once
    for run in plan.runs[: len(plan.conditions)]:
        if cannot := incapable(run.config):
            raise ConfigurationError(cannot)
        check_plugins(run.config)
    lacking = _without_held_out(plan)
    sources = dict.fromkeys(lacking.values())
    missing = [f"No held-out evaluation at the end: {name} holds nothing out." for name in sources]
    design = []  # what the campaign can conclude
    comparisons = len(plan.conditions) - 1
    if comparisons:
        from retrain.analysis.power import Correction, design_line

        evaluation = plan.runs[0].config.evaluation
        problems = evaluation.max_examples if evaluation.asked_for else 0
        correction: Correction = "evidence" if plan.settings.stop == "evidence" else "maxt"
        design = [
            design_line(
                len(plan.seeds), comparisons, problems, evaluation.samples, correction=correction
            )
        ]
    return Checked((*lines, *condition_notes(plan), *missing, *design), frozenset(lacking))


def condition_notes(plan: CampaignPlan) -> list[str]:
    """The notes about the runs, each once, preceded by its conditions unless it concerns all of
    them.
    """
    found: dict[str, list[str]] = {}
    for run in plan.runs[: len(plan.conditions)]:  # the first seed's
        for note in notes(run.config):
            found.setdefault(note, []).append(run.condition)
    return [
        note if len(labels) == len(plan.conditions) else f"{', '.join(labels)}: {note}"
        for note, labels in found.items()
    ]


def evaluated_where_possible(plan: CampaignPlan, checked: Checked) -> CampaignPlan:
    """The plan without the default evaluation for conditions that have no held-out split."""
    no_evaluation = {"evaluation.at_end": False}
    runs = [
        (
            replace(run, config=replaced(run.config, no_evaluation, origin="file"))
            if run.condition in checked.without_held_out
            else run
        )
        for run in plan.runs
    ]
    return replace(plan, runs=tuple(runs))


def _without_held_out(plan: CampaignPlan) -> dict[str, str]:
    """Condition -> data source, for conditions that would be evaluated but have no held-out split.
    Each source is loaded once.
    """
    known: dict[str, bool] = {}
    lacking: dict[str, str] = {}
    for run in plan.runs[: len(plan.conditions)]:
        if not run.config.evaluation.asked_for:
            continue
        source = repr((run.config.data, run.config.evaluation.source, run.config.environment))
        if source not in known:
            known[source] = _has_held_out(run.config, plan.config)
        if not known[source]:
            provider, data = (
                run.config.environment.provider,
                f"[data] source = {run.config.data.source!r}",
            )
            lacking[run.condition] = (
                f"[environment] {environment_name(run.config.environment)}" if provider else data
            )
    return lacking


def _has_held_out(config: TrainConfig, campaign: TrainConfig) -> bool:
    """True if a run has held-out problems. Raises NoHeldOutSplit if the user asked for an
    evaluation; the campaign's own default is no reason to refuse.
    """
    try:
        if config.environment.provider:
            with closing(load_environment(config)) as environment:
                load_problems(environment, config, "evaluation")
        else:
            load_examples(config, "heldout")
    except NoHeldOutSplit:
        if (
            campaign.is_set("evaluation.at_end")
            or config.evaluation.every
            or config.evaluation.at_start
        ):
            raise
        return False
    return True

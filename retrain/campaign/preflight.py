"""What a campaign says, and refuses, before its first run: once for all runs, or with the condition that it is about."""

from dataclasses import dataclass, replace

from retrain.campaign.plan import CampaignPlan, CampaignRun
from retrain.config import TrainConfig, replaced
from retrain.data.load import NoHeldOutSplit, load_examples
from retrain.run.notes import notes, preflight_lines, refuse_not_built


@dataclass(frozen=True)
class Checked:
    lines: tuple[str, ...]
    """Sentences for the start."""
    without_held_out: frozenset[str]
    """Conditions whose data source holds nothing out, so that the evaluation at the end, which nobody asked for, is left out."""


def check(plan: CampaignPlan) -> Checked:
    """Raises ConfigurationError for what no run could be started with, NoHeldOutSplit among it if evaluation was asked for."""
    refuse_not_built(plan.config)
    about_runs = notes(plan.config)
    lines = [line for line in preflight_lines(plan.config) if line not in about_runs]
    lacking, evaluation_lines = _without_held_out(plan)
    return Checked((*lines, *condition_notes(plan), *evaluation_lines), lacking)


def condition_notes(plan: CampaignPlan) -> list[str]:
    """What may surprise in the runs of some condition, once for those that share the sentence."""
    found: dict[str, list[str]] = {}
    for run in plan.runs[: len(plan.conditions)]:  # the first seed's
        for note in notes(run.config):
            found.setdefault(note, []).append(run.condition)
    return [note if len(labels) == len(plan.conditions) else f"{', '.join(labels)}: {note}" for note, labels in found.items()]


def _without_held_out(plan: CampaignPlan) -> tuple[frozenset[str], list[str]]:
    known: dict[str, bool] = {}
    lacking: dict[str, str] = {}
    for run in plan.runs[: len(plan.conditions)]:
        if not run.config.evaluation.asked_for:
            continue
        source = repr((run.config.data, run.config.evaluation.source))
        if source not in known:
            known[source] = _holds_something_out(run.config, by_default=_by_default(run.config, plan.config))
        if not known[source]:
            lacking[run.condition] = run.config.data.source
    lines = [f"No held-out evaluation at the end: [data] source = {name!r} holds nothing out." for name in dict.fromkeys(lacking.values())]
    return frozenset(lacking), lines


def evaluated_where_possible(plan: CampaignPlan, checked: Checked) -> CampaignPlan:
    """The plan, with the default evaluation off where nothing is held out."""
    runs = [_without_evaluation(run) if run.condition in checked.without_held_out else run for run in plan.runs]
    return replace(plan, runs=tuple(runs))


def _by_default(config: TrainConfig, campaign: TrainConfig) -> bool:
    """Whether the evaluation at the end is the campaign's own idea."""
    return not (campaign.is_set("evaluation.at_end") or config.evaluation.every or config.evaluation.at_start)


def _holds_something_out(config: TrainConfig, *, by_default: bool) -> bool:
    try:
        load_examples(config, "heldout")
    except NoHeldOutSplit:
        if by_default:
            return False
        raise
    return True


def _without_evaluation(run: CampaignRun) -> CampaignRun:
    return replace(run, config=replaced(run.config, {"evaluation.at_end": False}, origin="file"))

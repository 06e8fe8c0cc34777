"""Plan a campaign: one run for each condition and seed, with its name, its folder and its complete
configuration. The checks and notes before the first run come once for all runs, or with the
conditions that they concern.

Planning starts and writes nothing, so `retrain explain` shows the plan that a campaign would run.
"""

import sys
from collections.abc import Iterator
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from retrain.backends.base import backend_kind
from retrain.backends.declared import incapable
from retrain.config import TrainConfig, config_from_mapping, replaced
from retrain.config.judging import verifies
from retrain.config.load import arms, given_values
from retrain.config.names import folder_name
from retrain.config.plan import Plan
from retrain.config.schema import Campaign, Condition, Logging, Provenance
from retrain.data.prompts import fingerprint, load_examples
from retrain.data.sources import NoHeldOutSplit
from retrain.environments.loading import environment_name, load_environment, load_problems
from retrain.errors import ConfigurationError
from retrain.run.notes import notes, preflight_lines
from retrain.run.parts import check_packages, check_plugins
from retrain.system import Json
from retrain.tracking.build import tracker_names
from retrain.types import Example

RUNS = "runs"
THROTTLE = "tinker_throttle"
DEFAULT_MAX_STEPS = 500

_MODES = ("advantage_mode", "transform_mode", "algorithm_mode")


@dataclass(frozen=True)
class CampaignRun:
    """One run of a campaign."""

    name: str
    """`{condition}_s{seed}`: its folder under runs/, and its name in trackers."""
    condition: str
    """The condition's label."""
    seed: int
    config: TrainConfig
    """The configuration of this run alone, without [campaign]."""

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.config.logging.log_dir)


@dataclass(frozen=True)
class CampaignPlan:
    """A campaign's runs in the order in which they start: all conditions of the first seed, then of
    the second, and so on.

    A comparison needs pairs of runs with the same seed; in this order an interrupted campaign holds
    as many as possible.
    """

    config: TrainConfig
    """The configuration of the campaign, with its [campaign] section."""
    folder: Path
    conditions: tuple[str, ...]
    """Labels, in the file's order; the first is the baseline."""
    seeds: tuple[int, ...]
    max_steps: int
    runs: tuple[CampaignRun, ...]

    @property
    def settings(self) -> Campaign:
        """The [campaign] section."""
        return settings_of(self.config)

    @property
    def throttle_dir(self) -> Path:
        """The folder of the locks that the workers of a Tinker campaign share."""
        return self.folder / THROTTLE


def plan_campaign(config: TrainConfig, folder: Path) -> CampaignPlan:
    """Plan the runs of a campaign in `folder`. Raises ConfigurationError for a condition whose
    values are invalid together.
    """
    settings = settings_of(config)
    steps = max_steps(config)
    views, seeds = arms(config), planned_seeds(settings)
    runs = [
        _run(
            view,
            condition,
            seed=seed,
            steps=steps,
            folder=folder,
            shared=_shared_evaluation(view, config),
        )
        for seed in seeds
        for condition, view in zip(config.conditions, views, strict=True)
    ]
    labels = tuple(condition.label for condition in config.conditions)
    return CampaignPlan(config, folder, labels, seeds, steps, tuple(runs))


def settings_of(config: TrainConfig) -> Campaign:
    """Return the [campaign] section. Raises ConfigurationError if there is none."""
    if config.campaign is None:
        raise ConfigurationError(
            f"{config.source_path or 'the configuration'} has no [campaign] section; add one."
        )
    return config.campaign


def planned_seeds(settings: Campaign) -> tuple[int, ...]:
    """Return the seeds of the file. With stop = "evidence" further seeds follow, counted on from
    the largest, up to max_seeds.
    """
    more = max(0, settings.max_seeds - len(settings.seeds)) if settings.stop == "evidence" else 0
    return *settings.seeds, *range(max(settings.seeds) + 1, max(settings.seeds) + 1 + more)


def max_steps(config: TrainConfig) -> int:
    """Return the steps of each run: `[campaign] max_steps`, or else `[training] max_steps` if the
    user gave it, or else 500.
    """
    given = settings_of(config).max_steps
    if given is not None:
        return given
    return config.training.max_steps if config.is_set("training.max_steps") else DEFAULT_MAX_STEPS


def run_name(condition: str, seed: int) -> str:
    """Return the name of a run, `{condition}_s{seed}`, in characters that a folder's name may
    have.
    """
    return f"{folder_name(condition)}_s{seed}"


def _shared_evaluation(view: TrainConfig, base: TrainConfig) -> Json:
    """Return the keys of [evaluation] that a condition takes from the base: the judge, and the
    sampling of held-out answers.

    For example, a condition that trains at another temperature is still evaluated at the
    temperature of the base. The condition's own keys of [evaluation] stay. The judge is the base's
    reward, so that the held-out accuracies of all conditions compare. A base whose reward verifies
    nothing or is a sum shares no judge.
    """
    echoed = ("temperature", "max_tokens", "top_k", "top_p", "min_p")
    pinned = {
        name: getattr(base.training, name)
        for name in echoed
        if getattr(view.evaluation, name) is None
        and getattr(view.training, name) != getattr(base.training, name)
    }
    judges = base.reward.types
    if (
        not view.evaluation.reward
        and view.reward.types != judges
        and len(judges) == 1
        and verifies(judges[0])
    ):
        pinned["reward"] = judges[0]
    return pinned


def _run(
    view: TrainConfig,
    condition: Condition,
    *,
    seed: int,
    steps: int,
    folder: Path,
    shared: Json,
) -> CampaignRun:
    """Return one run; `view` is the campaign's configuration with the keys of this condition."""
    label = condition.label
    name = run_name(label, seed)
    data = given_values(view)
    # A run is a run of its own: nothing in its file is about the campaign.
    for section in ("campaign", "squeeze", "resume"):
        data.pop(section, None)
    algorithm = {
        key: value for key, value in data.get("algorithm", {}).items() if key not in _MODES
    }
    data["algorithm"] = algorithm | {
        key: getattr(condition, key) for key in _MODES if getattr(condition, key)
    }
    _put(data, "training", seed=seed, max_steps=steps)
    _put(data, "logging", log_dir=str(folder / RUNS / name), label=label)
    _put(data, "logging", **_tracking(view.logging, name, label, seed))
    if not view.is_set("evaluation.at_end"):
        _put(data, "evaluation", at_end=True)
    if shared:
        _put(data, "evaluation", **shared)
    if view.backend.adapter_path:
        adapter = Path(view.backend.adapter_path) / folder.resolve().name
        _put(data, "backend", adapter_path=str(adapter))
    if backend_kind(view.backend.backend).throttled and not view.backend.throttle_dir:
        _put(data, "backend", throttle_dir=str(folder / THROTTLE))
    return CampaignRun(
        name, label, seed, config_from_mapping(data, provenance=Provenance(view.source_path))
    )


def _tracking(given: Logging, name: str, label: str, seed: int) -> dict[str, str]:
    """Return the keys of [logging] that name a run in its trackers; the user's group wins, and the
    user's tags come first.
    """
    keys: dict[str, str] = {}
    trackers = set(tracker_names(given))
    if trackers & {"wandb", "trackio"}:
        keys = {"wandb_run_name": name, "wandb_group": given.wandb_group or label}
    if "wandb" in trackers:  # trackio has no tags.
        keys["wandb_tags"] = ",".join(dict.fromkeys((*given.tags, label, f"seed{seed}")))
    return keys


def _put(data: Json, section: str, **values: Any) -> None:
    data[section] = {**data.get(section, {}), **values}


# -- before the first run --------------------------------------------------------------------------


@dataclass(frozen=True)
class Findings:
    """The findings of the checks."""

    lines: tuple[str, ...]
    """Sentences to print before the first run."""
    without_held_out: frozenset[str]
    """Conditions whose data source has no held-out split, so that retrain leaves out the default
    evaluation at the end.
    """
    heldout_sha256: str
    """The hash of the held-out problems; "" if unknown."""


def check(plan: CampaignPlan) -> Findings:
    """Check what all runs need. Raises ConfigurationError or EnvironmentFailure if a run could not
    start, and NoHeldOutSplit if the configuration asks for an evaluation without a held-out split.
    """
    about_runs = notes(plan.config)
    lines = [line for line in preflight_lines(plan.config) if line not in about_runs]
    # Check plugins before any data, so that a wrong name fails at once.
    for run in plan.runs[: len(plan.conditions)]:
        if cannot := incapable(run.config):
            raise ConfigurationError(cannot)
        check_plugins(run.config)
        if plan.settings.launcher != "ray":  # Its machines may have other packages.
            check_packages(run.config)
    lacking, (problems, held_out), differ = _held_out_of(plan)
    missing = "The runs end without a held-out evaluation: {} holds nothing out."
    lines += [
        *condition_notes(plan),
        *map(missing.format, dict.fromkeys(lacking.values())),
        *_design_lines(plan, problems),
        *[_APART] * differ,
    ]
    return Findings(tuple(lines), frozenset(lacking), held_out)


def _design_lines(plan: CampaignPlan, problems: int) -> Iterator[str]:
    """Yield sentences on the differences that the campaign's seeds can find, and on a margin that
    needs more seeds. `problems` is the number of held-out problems, 0 if unknown.
    """
    from retrain.analysis.power import Rule, design_line, equivalence_line

    settings, comparisons = plan.settings, len(plan.conditions) - 1
    if not comparisons:
        return
    seeds, rule = len(plan.seeds), Rule(comparisons, correction=settings.correction)
    yield design_line(seeds, rule, problems, plan.runs[0].config.evaluation.samples)
    yield from equivalence_line(seeds, comparisons, settings)


def condition_notes(plan: CampaignPlan) -> list[str]:
    """Return the notes about the runs, each once, after the names of its conditions unless it
    concerns all of them.
    """
    found: dict[str, list[str]] = {}
    for run in plan.runs[: len(plan.conditions)]:  # These runs have the first seed.
        for note in notes(run.config):
            found.setdefault(note, []).append(run.condition)
    return [
        note if len(labels) == len(plan.conditions) else f"{', '.join(labels)}: {note}"
        for note, labels in found.items()
    ]


def evaluated_where_possible(plan: CampaignPlan, checked: Findings) -> CampaignPlan:
    """Return the plan without the default evaluation for conditions that have no held-out split."""
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


_APART = (
    "The conditions have different held-out problems, so `retrain compare` cannot compare their"
    " accuracies; name problems for all of them in [evaluation] source."
)
HeldOut = tuple[int, str]
"""The number of held-out problems, and their hash; 0 and "" if unknown."""


def _held_out_of(plan: CampaignPlan) -> tuple[dict[str, str], HeldOut, bool]:
    """Return condition -> data source, for conditions that ask for an evaluation without a held-out
    split. Return the held-out problems of the first too, and True if another condition has others.
    It loads each source once.
    """
    known: dict[str, HeldOut | None] = {}
    lacking: dict[str, str] = {}
    for run in plan.runs[: len(plan.conditions)]:
        config = run.config
        if not config.evaluation.asked_for:
            continue
        source = repr((config.data, config.evaluation.source, config.environment))
        if source not in known:
            known[source] = _held_out(config, plan.config)
        if known[source] is None:
            place = f"[data] source = {config.data.source!r}"
            if config.environment.provider:
                place = f"[environment] {environment_name(config.environment)}"
            lacking[run.condition] = "[data] mix" if config.data.mix else place
    hashes = {found[1] for found in known.values() if found and found[1]}
    return lacking, next(iter(known.values()), None) or (0, ""), len(hashes) > 1


def _held_out(config: TrainConfig, campaign: TrainConfig) -> HeldOut | None:
    """Return the held-out problems of a run; None if it has none. Raises NoHeldOutSplit
    if the user asked for an evaluation; the campaign's own default is not a reason to refuse.
    """
    try:
        return _load_held_out(config)
    except NoHeldOutSplit:
        if (
            campaign.is_set("evaluation.at_end")
            or config.evaluation.every
            or config.evaluation.at_start
        ):
            raise
        return None


def _load_held_out(config: TrainConfig) -> HeldOut:
    """Return the held-out problems; raise NoHeldOutSplit without any. A source of a mixture may
    lack them, but not all.
    """
    if config.data.mix and not config.evaluation.source:
        sources, hashes = Plan.of(config).sources, list[str]()
        for number, source in enumerate(sources, start=1):
            with suppress(NoHeldOutSplit) if hashes or number < len(sources) else nullcontext():
                hashes.append(_load_held_out(source.config)[1])
        return 0, sha256("+".join(hashes).encode()).hexdigest() if any(hashes) else ""
    if config.environment.provider:
        with closing(load_environment(config)) as environment:
            load_problems(environment, config, "evaluation")
        return 0, ""
    counts, every = 0, list[Example]()
    for own in Plan.of(config).evaluations:
        examples = load_examples(own, "heldout").examples
        counts += min(len(examples), own.evaluation.max_examples or sys.maxsize)
        every += examples
    return counts, fingerprint(every)

"""Collect the data that `retrain explain` shows. It includes the warnings about a campaign: too few
seeds to conclude anything, more workers than recommended, shared device memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from retrain.advantages.sepa import follows_schedule, maximal_lambda
from retrain.analysis.power import (
    Rule,
    design_line,
    equivalence_line,
    minimal_detectable_effect,
)
from retrain.analysis.runs import StoredRun, campaign_runs
from retrain.backends.base import BackendCapabilities, backend_kind
from retrain.backends.declared import declared_backend, declared_engine, incapable, loss_notes
from retrain.campaign.manifest import Manifest
from retrain.campaign.plan import (
    CampaignPlan,
    CampaignRun,
    condition_notes,
    plan_campaign,
    planned_seeds,
)
from retrain.config import TrainConfig, replaced, unused_keys
from retrain.config.keys import all_keys
from retrain.config.schema import Condition, Squeeze
from retrain.data.mixing import Quota, planned_quotas
from retrain.errors import ConfigurationError, EnvironmentFailure, RunFailed
from retrain.explain.inputs import InputProblems
from retrain.explain.timing import (
    Schedule,
    StepTime,
    from_pilot,
    from_probe,
    pilot_differences,
    schedule_campaign,
)
from retrain.inference_engine.base import EngineCapabilities
from retrain.model.text import placed
from retrain.records.redact import Redactor, note_secrets
from retrain.run.notes import notes
from retrain.run.parts import Say
from retrain.system import Json
from retrain.xray.resolve import headline_of

if TYPE_CHECKING:
    from retrain.analysis.pilot import Pilot
    from retrain.config.schema import Campaign
    from retrain.model.memory import Memory
    from retrain.squeeze.adapter import LoraAdapter


# -- warnings --------------------------------------------------------------------------------------


ALPHA, POWER = 0.05, 0.8
"""The defaults of `compare` and `power`."""


@dataclass(frozen=True)
class Power:
    """The effects that a campaign's seeds can detect when retrain compares every condition with the
    first.
    """

    seeds: int
    comparisons: int
    seeds_needed: int
    """The fewest seeds that allow a significant result."""
    detectable: float | None
    """The smallest mean difference that a campaign finds with a probability of POWER. The unit is
    the pilot's metric, or else the standard deviation of the paired differences. The value is None
    if no result can be significant.
    """
    metric: str | None
    """The metric of the pilot; None without a pilot that shows the spread."""

    def to_json(self) -> Json:
        return asdict(self) | {"alpha": ALPHA, "power": POWER}


def campaign_power(
    campaign: "Campaign | None", conditions: int, pilot: Path | None
) -> Power | None:
    """Compute what a campaign can detect; None unless it has two conditions or more."""
    if campaign is None or conditions < 2:
        return None
    seeds, comparisons = len(planned_seeds(campaign)), conditions - 1
    found: Pilot | None = None
    if pilot is not None:
        from retrain.analysis.pilot import read_pilot

        # A pilot of too few runs, or without a difference, leaves the spread unknown.
        with suppress(ConfigurationError):
            found = read_pilot(pilot)
        found = found if found and found.sd > 0 else None
    rule = Rule(comparisons, ALPHA, POWER, campaign.correction)
    detectable = minimal_detectable_effect(seeds, found.sd if found else 1.0, rule)
    metric = found.metric.name if found else None
    return Power(seeds, comparisons, rule.fewest, detectable, metric)


def caveats(
    config: "TrainConfig", schedule: "Schedule | None", memory: "Memory | None", power: Power | None
) -> Iterator[str]:
    if memory and (disk := memory.disk_line()):
        yield disk
    if config.campaign is None:
        return
    if power and power.seeds <= power.seeds_needed:
        rule = Rule(power.comparisons, ALPHA, POWER, config.campaign.correction)
        yield design_line(power.seeds, rule)
    if power:
        yield from equivalence_line(power.seeds, power.comparisons, config.campaign)
    if config.is_set("evaluation.at_end") and not config.evaluation.asked_for:
        yield (
            "No held-out evaluation ([evaluation] at_end = false), so retrain compares"
            " conditions by their training correct rate."
        )
    sharing = config.campaign.workers_per_device
    if not (memory and schedule) or memory.machine.device_type != "cuda" or sharing < 2:
        return
    from retrain.model.memory import byte_words

    if schedule.effective_parallelism > 1 and sharing * memory.peak > memory.machine.memory:
        yield (
            f"[campaign] workers_per_device = {sharing} takes up to"
            f" {byte_words(sharing * memory.peak)} of {byte_words(memory.machine.memory)} on"
            " one device, since each run sizes its KV cache for the whole device."
        )


# -- what is shown ---------------------------------------------------------------------------------


CAMPAIGN_FOLDER = Path("logs/campaign_<time>")
"""Placeholder: a campaign names the real folder after the time of its start."""


@dataclass(frozen=True)
class Setting:
    """A value that differs from its default."""

    key: str
    """The key, as "section.key"."""
    value: Any
    origin: str
    """"file", "environment NAME", "flag --name" or "implied by KEY"."""


@dataclass(frozen=True)
class ExplainedCondition:
    """A condition of a campaign, or the algorithm of a single run."""

    label: str
    sets: Json
    """Keys that the condition sets, apart from its modes."""
    maximal_lambda: float | None
    """The largest lambda on SEPA's ramp; None unless the condition uses it."""
    weights: str = ""
    """The weight of a prompt in the advantage by its pass rate; "" if the advantage has none."""


@dataclass(frozen=True)
class Explanation:
    config: TrainConfig
    settings: Sequence[Setting]
    unused: tuple[str, ...]
    """One sentence per key that the user set without an effect."""
    refused: tuple[str, ...]
    """One sentence per reason why the configuration would not start."""
    unavailable: tuple[str, ...] = field(default=(), kw_only=True)
    """One sentence for each thing that this machine lacks: a device, a package, a model."""
    conditions: Sequence[ExplainedCondition] = ()
    runs: tuple[CampaignRun, ...] = ()
    """The runs, in the order of their start."""
    schedule: Schedule | None = None
    memory: "Memory | None" = None
    memory_unknown: str = ""
    """The reason for a missing prediction of the memory; empty with a prediction."""
    power: Power | None = None
    adapter: "LoraAdapter | None" = None
    """The adapter of a squeeze job."""
    warnings: tuple[str, ...] = field(default=())
    engine: EngineCapabilities | None = None
    """The capabilities that the engine declares; None if the backend samples by itself or retrain
    cannot read the declaration.
    """
    backend: BackendCapabilities | None = None
    traces: Sequence[str] = ()
    """The size of the supervised stage, then a few traces with marks around the learned part."""
    losses: tuple[str, ...] = ()
    """One sentence on each plugin of [loss]: what retrain proved of it, and what it declares."""

    @property
    def kind(self) -> Literal["run", "campaign", "squeeze"]:
        return self.config.kind

    @property
    def seeds(self) -> list[int]:
        return list(dict.fromkeys(run.seed for run in self.runs))

    @cached_property
    def mix(self) -> list[Quota]:
        """The quotas of the sources of `[[data.mix]]`, in the first run; [] without a mixture."""
        return planned_quotas(self.runs[0].config) if self.runs else []

    def to_json(self) -> Json:
        adapter = self.adapter
        declared = {"engine": self.engine, "backend": self.backend}
        predicted = {"schedule": self.schedule, "memory": self.memory, "power": self.power}
        tables: dict[str, Sequence[Any]] = {
            "conditions": self.conditions,
            "mix": self.mix,
            "settings": self.settings,
        }
        shape = {"max_steps", "batch_size", "group_size", "max_tokens"}
        return {
            "kind": self.kind,
            "file": str(self.config.source_path) if self.config.source_path else None,
            "seeds": self.seeds,
            "runs": [
                {
                    "name": run.name,
                    "condition": run.condition,
                    "seed": run.seed,
                    "dir": str(run.folder),
                }
                for run in self.runs
            ],
            "training": (
                self.runs[0].config.training.model_dump(include=shape) if self.runs else None
            ),
            **{name: [asdict(row) for row in rows] for name, rows in tables.items()},
            **{name: found and found.to_json() for name, found in predicted.items()},
            **{name: found and asdict(found) for name, found in declared.items()},
            "unused": self.unused,
            "refused": self.refused,
            "unavailable": self.unavailable,
            "warnings": self.warnings,
            "memory_unknown": self.memory_unknown or None,
            "loss": self.losses,
            "sft": self.traces,
            "squeeze": adapter
            and {
                "adapter": str(adapter.folder),
                "rank": adapter.rank,
                "layers": len(adapter.layers),
            },
        }


def explain(
    config: TrainConfig,
    *,
    pilot: Path | None = None,
    probe: bool = False,
    price_per_hour: float | None = None,
    memory_gib: float | None = None,
    say: Say = lambda line: None,
) -> Explanation:
    """Predict what `config` would do. This writes no file, and starts only the step of `probe`.

    `pilot` is a folder of runs that gives the step times; `memory_gib` is the memory of a device on
    another machine. Raises ConfigurationError for a pilot without steps, and with `probe` whatever
    a run raises before its first step ends.
    """
    note_secrets(config)
    settings, unused = _settings(config), tuple(unused_keys(config))
    if config.kind == "squeeze":
        adapter, problems = _adapter_of(config.squeeze)
        return Explanation(config, settings, unused, tuple(problems), adapter=adapter)
    runs, plan = _runs(config)
    # A campaign starts with all conditions of its first seed.
    first_runs = runs[: len(config.conditions)]
    configs = [placed(run.config) for run in first_runs]
    memory, unknown, refused = _memory(configs, memory_gib)
    step_time, differences = _step_time(runs[0].config, pilot, say, probe=probe)
    schedule, problems = _schedule(config, plan, memory, step_time, price_per_hour)
    engine, backend, incapacities, losses = _capabilities(configs)
    inputs = InputProblems.of(configs, here=memory_gib is None)
    power = campaign_power(config.campaign, len(config.conditions), pilot)
    warnings = (
        *(notes(config) if plan is None else condition_notes(plan)),
        *_unique(inputs.warnings),
        *caveats(config, schedule, memory, power),
        *differences,
    )
    return Explanation(
        config,
        settings,
        unused,
        _unique([*problems, *incapacities, *inputs.refused, *refused, *_refused_resume(plan)]),
        unavailable=_unique(inputs.lacking),
        conditions=_conditions(config.conditions, first_runs),
        runs=runs,
        schedule=schedule,
        memory=memory,
        memory_unknown=unknown,
        power=power,
        warnings=warnings,
        engine=engine,
        backend=backend,
        traces=inputs.traces,
        losses=losses,
    )


def _unique(sentences: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct notes of several runs."""
    return tuple(dict.fromkeys(sentences))


def _step_time(
    config: TrainConfig, pilot: Path | None, say: Say, *, probe: bool
) -> tuple[StepTime | None, Iterable[str]]:
    """Return the time of a step if it can be known, and how the pilot differs from `config`."""
    if probe:
        return from_probe(config, say), ()
    if pilot:
        return from_pilot(pilot), pilot_differences(pilot, config)
    return None, ()


def _capabilities(
    configs: Sequence[TrainConfig],
) -> tuple[EngineCapabilities | None, BackendCapabilities | None, list[str], tuple[str, ...]]:
    """Return the declarations of engine and backend, a sentence for each need of the runs beyond
    them, and a sentence for each plugin of [loss].
    """
    try:
        problems = list(chain.from_iterable(incapable(config) for config in configs))
        losses = (
            ()
            if problems
            else _unique(chain.from_iterable(loss_notes(config) for config in configs))
        )
        return declared_engine(configs[0]), declared_backend(configs[0]), problems, losses
    except ConfigurationError as error:  # A plugin does not load.
        return None, None, list(error.problems), ()


def _settings(config: TrainConfig) -> list[Setting]:
    origins = config.origins
    config = Redactor().config(config)
    values = [(key, config.value(key.path)) for key in all_keys()]
    return [
        Setting(key.path, value, origins[key.path])
        for key, value in values
        if key.path != "campaign.conditions" and value is not None and value != key.default
    ]


def _runs(config: TrainConfig) -> tuple[tuple[CampaignRun, ...], CampaignPlan | None]:
    """Return the runs, and the plan if it is a campaign."""
    if config.kind == "campaign":
        named = config.resume.from_ or config.is_set("logging.log_dir")
        plan = plan_campaign(config, config.folder if named else CAMPAIGN_FOLDER)
        return plan.runs, plan
    folder = config.folder
    return (CampaignRun(folder.name, config.condition_label, config.training.seed, config),), None


def _refused_resume(plan: CampaignPlan | None) -> tuple[str, ...]:
    """Return the reasons for which the stored campaign cannot continue with `plan`."""
    if plan and plan.config.resume.from_:
        try:
            campaign_runs(plan.folder)  # This refuses another folder.
            Manifest.read(plan.folder).resumed_with(plan)
        except ConfigurationError as error:
            return error.problems
        except RunFailed as error:  # a damaged manifest
            return (str(error),)
    return ()


def _schedule(
    config: TrainConfig,
    plan: CampaignPlan | None,
    memory: "Memory | None",
    step_time: StepTime | None,
    price_per_hour: float | None,
) -> tuple[Schedule | None, list[str]]:
    """Return the schedule, or None and the reasons if a campaign has more workers than its devices
    have room for.
    """
    steps_done = 0
    if config.resume.from_:
        folders = [run.folder for run in plan.runs] if plan else [config.folder]
        steps_done = sum(StoredRun(folder).steps for folder in folders)
    if plan is None:
        devices = len(config.backend.device_list)
        return (
            Schedule(
                1,
                config.training.max_steps,
                steps_done,
                1,
                None,
                devices,
                step_time,
                price_per_hour or 0.0,
            ),
            [],
        )
    try:
        return schedule_campaign(plan, steps_done, memory, step_time, price_per_hour), []
    except ConfigurationError as error:
        return None, list(error.problems)


def _conditions(
    given: Sequence[Condition], runs: Sequence[CampaignRun]
) -> list[ExplainedCondition]:
    sets = {condition.label: condition.sets for condition in given}
    conditions = []
    for run in runs:
        largest = maximal_lambda(run.config.sepa, run.config.training.max_steps)
        follows = follows_schedule(run.config.algorithm)
        conditions.append(
            ExplainedCondition(
                run.condition,
                sets.get(run.condition, {}),
                largest if follows else None,
                headline_of(run.config),
            )
        )
    return conditions


def _memory(
    configs: Sequence[TrainConfig], memory_gib: float | None
) -> "tuple[Memory | None, str, Sequence[str]]":
    """Predict the memory of the largest run. Return also why it is unknown, and what a run would
    refuse.
    """
    backend = configs[0].backend.backend
    if not backend_kind(backend).in_process:
        return None, f'The "{backend}" backend does not hold the model on this machine.', ()
    from retrain.model.devices import choose_device
    from retrain.model.memory import predict_memory

    # Explaining runs no code.
    configs = [replaced(config, {"model.trust_remote_code": False}) for config in configs]
    if memory_gib is None:
        try:
            choose_device(configs[0].backend)
        except EnvironmentFailure as error:
            return (
                None,
                f"{error} Or predict for a device elsewhere by its memory: --memory-gib 24.",
                (),
            )
    sizing = [
        key.path for key in all_keys() if key.traits.sizes_memory and key.path != "training.seed"
    ]
    # Runs of equal memory only once.
    distinct = {str(list(map(config.value, sizing))): config for config in configs}
    try:
        return (
            max(
                (predict_memory(config, memory_gib=memory_gib) for config in distinct.values()),
                key=lambda memory: memory.peak,
            ),
            "",
            (),
        )
    except ConfigurationError as error:
        return None, str(error), error.problems
    except EnvironmentFailure as error:
        return None, str(error), ()


def _adapter_of(settings: Squeeze) -> "tuple[LoraAdapter | None, list[str]]":
    """Read the adapter of a squeeze job, or return the reason why retrain would refuse the job."""
    from retrain.squeeze.adapter import read_adapter
    from retrain.squeeze.analysis import svd_device, tried_ranks
    from retrain.squeeze.job import check_settings

    try:
        adapter = read_adapter(Path(settings.adapter_path))
        svd_device(settings.device)
        check_settings(settings, adapter)
        tried_ranks(settings.target_ranks, adapter.rank)
    except ConfigurationError as error:
        return None, list(error.problems)
    except EnvironmentFailure as error:
        return None, [str(error)]
    return adapter, []

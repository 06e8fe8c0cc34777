"""The arms of a contrast, and the rollouts of one step that all of them are given."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from retrain.analysis.runs import StoredRun, campaign_runs, is_campaign, is_run, no_run
from retrain.backends.declared import backend_class
from retrain.backends.local.backend import LocalBackend
from retrain.campaign.plan import max_steps, plan_campaign
from retrain.config import TrainConfig, config_from_mapping, load_config
from retrain.config.load import given_values, read_toml
from retrain.config.moving import given, scheduled, with_values
from retrain.config.names import is_recipe
from retrain.config.recipes import recipe
from retrain.config.schema import Condition, Provenance
from retrain.config.values import MAX_COMPLETIONS
from retrain.data.samplers import PromptChoice
from retrain.errors import ConfigurationError
from retrain.inspect.credit import recorded_groups, stored_steps
from retrain.plugins import named_code
from retrain.records.checkpoint import Checkpoint, CheckpointStore
from retrain.records.checkpoint_place import stored_checkpoints
from retrain.records.redact import note_secrets
from retrain.records.run_folder import refuse_foreign_code
from retrain.records.state import TrainerState
from retrain.run.dialogues import Watcher
from retrain.run.interrupts import Interrupts
from retrain.run.parts import Parts, load_parts, training_plan
from retrain.system import Json
from retrain.types import Group

Say = Callable[[str], None]
DEFAULT_SEEDS = 8
"""Seeds of a campaign, for a run that is not part of one."""
_OF_ONE_ARM = ("advantage_params", "transform_params", "params", "uncertainty_kind")
"""Keys of [algorithm] that belong to the run's own advantage or transform."""
_SEEN = ("algorithm", "gtpo", "hicra", "loss", "planning", "schedule", "sepa")
"""Sections whose keys change a gradient of the same rollouts."""


@dataclass(frozen=True)
class Arm:
    label: str
    config: TrainConfig
    note: str = ""
    """What its condition sets beyond what a contrast shows."""


@dataclass(frozen=True)
class Batch:
    """The judged groups of one step."""

    groups: list[Group]
    step: int
    """Optimizer steps behind the weights that sampled them."""
    source: str
    """Where they are from, in words."""
    kept: Mapping[str, Any] = field(default_factory=dict)
    """What the run's advantage kept before the step."""

    @property
    def pass_rate(self) -> float:
        return float(np.mean([group.correct / len(group) for group in self.groups]))


def read_arms(base: TrainConfig, path: Path | None, *, trust: bool, say: Say) -> list[Arm]:
    """Return the arms of a file, each the configuration `base` with a condition's keys on top; the
    first is the baseline.

    The file holds `[[conditions]]`, or `[campaign]` with its own. Without a file the arms are the
    conditions of `base` if it is a campaign, and a campaign's default ones otherwise. Raises
    ConfigurationError for a file with fewer than two arms, for conditions that are wrong, and for
    code that a file in a run's folder names unless it is to be trusted.
    """
    values = given_values(base)
    campaign: Json = dict(values.pop("campaign", {}))
    if path is not None:
        campaign = _conditions_of(path)
    own = values.get("algorithm", {})
    values["algorithm"] = {key: value for key, value in own.items() if key not in _OF_ONE_ARM}
    # One seed: the plan is made for its conditions alone.
    if base.campaign:
        steps, seeds = max_steps(base), base.campaign.seeds[:1]
    else:
        steps, seeds = base.training.max_steps, [max(base.training.seed, 0)]
    values["campaign"] = campaign | {"seeds": list(seeds), "max_steps": steps}
    planned = config_from_mapping(values, provenance=Provenance(path or base.source_path))
    runs = plan_campaign(_visible(planned), Path(base.logging.log_dir)).runs
    notes = {condition.label: _unseen_note(condition) for condition in planned.conditions}
    arms = [Arm(run.condition, run.config, notes[run.condition]) for run in runs]
    for arm in arms:
        if arm.note:
            say(f"{arm.label}: {arm.note}.")
    if len(arms) < 2:
        raise ConfigurationError(
            f"{path or 'the campaign'} names one arm, which leaves nothing to compare; name two or"
            " more."
        )
    if not trust:
        for arm in arms:
            refuse_foreign_code(arm.config, "a contrast")
    return arms


def _conditions_of(path: Path) -> Json:
    given = read_toml(path)
    nested = given.get("campaign", given)
    if "conditions" not in nested and nested is given:
        raise ConfigurationError(
            f"{path} names no arms; write [[conditions]] with advantage_mode and transform_mode,"
            " one for each arm, or name a campaign's file."
        )
    if "conditions" in nested:
        return {"conditions": nested["conditions"]}
    return {}


def _unseen(condition: Condition) -> list[str]:
    """The keys that a condition or its recipe sets, and that do not change a gradient of given
    rollouts.
    """
    paths = [*condition.sets]
    if is_recipe(condition.algorithm_mode):
        paths += recipe(condition.algorithm_mode)
    return [path for path in dict.fromkeys(paths) if path.split(".")[0] not in _SEEN]


def _unseen_note(condition: Condition) -> str:
    if not (unseen := _unseen(condition)):
        return ""
    return (
        f"{', '.join(unseen)} is left out: all arms are given the same rollouts and rewards, so a"
        " difference that it makes does not show"
    )


def _visible(config: TrainConfig) -> TrainConfig:
    """Drop from the conditions the keys that cannot change a gradient of given rollouts."""
    assert config.campaign is not None
    conditions = []
    for condition in config.conditions:
        hidden = _unseen(condition)
        kept = {path: value for path, value in condition.sets.items() if path not in hidden}
        conditions.append(
            condition.model_copy(update={"sets": kept, "given_label": condition.label})
        )
    campaign = config.campaign.model_copy(update={"conditions": conditions})
    return config.model_copy(update={"campaign": campaign})


def planned_seeds(base: TrainConfig, target: Path) -> int:
    """The seeds of the campaign that a file describes or a run belongs to, else a campaign's
    default.
    """
    if base.campaign:
        return len(base.campaign.seeds)
    above = target.resolve().parent.parent
    if is_campaign(above):
        return len({run.seed for run in campaign_runs(above)})
    return DEFAULT_SEEDS


def load_base(target: Path, trust: bool) -> TrainConfig:
    """Load the configuration of a run's folder or of a file. Raises ConfigurationError for anything
    else, and for code that a run's folder names unless it is to be trusted.
    """
    if not target.is_dir():
        config = load_config(target)
        if not trust:
            refuse_foreign_code(config, "a contrast")
        return config
    if not is_run(target):
        raise ConfigurationError(f"{no_run(target)}; name a run's folder or a configuration.")
    file = StoredRun(target).folder.config
    config = load_config(file, environ={})  # complete: today's variables do not apply to it
    if not trust and (named := named_code(config)):
        raise ConfigurationError(
            f"{file} names Python code that a contrast would execute: {'; '.join(named)}. Read the"
            " code first, then add --trust."
        )
    return config


@contextmanager
def opened(
    target: Path, config: TrainConfig, step: int | None, say: Say
) -> Iterator[tuple[Parts, LocalBackend, TrainerState]]:
    """Load the model with the weights of `step` completed steps, by default the newest
    checkpoint's. Raises ConfigurationError for a backend that computes elsewhere.
    """
    if not backend_class(config).in_process:
        raise ConfigurationError(
            f'[backend] backend = "{config.backend.backend}" keeps its gradients; a contrast needs'
            " one that computes here, such as --backend local."
        )
    note_secrets(config)
    found = None
    if target.is_dir():
        found = _checkpoint(target, step, say)
    elif step:
        raise ConfigurationError(
            f"--step {step} needs a run's folder, and {target} is a configuration."
        )
    state = _untrained(config)
    if found:
        state = found.state()
    config = _moved(config, state)
    parts = load_parts(config, state.choices, say, learns=False)
    try:
        backend = parts.backend
        assert isinstance(backend, LocalBackend)
        if found:
            backend.load(found.folder)
        yield parts, backend, state
    finally:
        parts.close()


def _moved(config: TrainConfig, state: TrainerState) -> TrainConfig:
    """The configuration with the values that [schedule] gives to the step after `state`."""
    return with_values(config, scheduled(config, state.step))


def moved_arms(arms: Sequence[Arm], parts: Parts, batch: Batch) -> Iterator[Arm]:
    """The arms with the values that their [schedule] gives to the step of a batch. How the run
    sampled it is the arm's too.
    """
    run = parts.credit.config
    for arm in arms:
        shared = ["training.temperature", "training.lr"]
        sampled = {path: given(run, path) for path in shared}
        values = scheduled(arm.config, batch.step) | sampled
        yield replace(arm, config=with_values(arm.config, values))


def _untrained(config: TrainConfig) -> TrainerState:
    return TrainerState(
        seed=max(config.training.seed, 0), config_hash="", batch_size=config.training.batch_size
    )


def _checkpoint(target: Path, step: int | None, say: Say) -> Checkpoint | None:
    store = CheckpointStore(stored_checkpoints(StoredRun(target).folder))
    if step == 0:
        return None
    if step is None:
        return store.newest_to_read(say)
    return store.at(step)


def refuse_too_many(config: TrainConfig, prompts: int | None) -> None:
    """Raise ConfigurationError for more prompts than the completions of a step may have."""
    size = config.training.group_size
    most = MAX_COMPLETIONS // size
    if prompts is not None and prompts > most:
        raise ConfigurationError(
            f"--prompts {prompts} with [training] group_size = {size} are more than"
            f" {MAX_COMPLETIONS:,} completions, which are held in memory at once; give {most} at"
            " most."
        )


def take_batch(
    target: Path, parts: Parts, state: TrainerState, *, prompts: int | None, texts: bool, say: Say
) -> Batch:
    """Return the rollouts of the step after `state`: those that the run recorded, else drawn anew
    with the run's own prompts and noise.

    `prompts` asks for another number of them, and `texts` for what no record has: then they are
    drawn. Raises ConfigurationError where no completion could be judged.
    """
    config, step = parts.credit.config, state.step
    if target.is_dir() and prompts is None and not texts:
        run = StoredRun(target)
        groups = None
        if step in stored_steps(run.folder):
            groups = recorded_groups(run, step)
        if groups:
            return Batch(groups, step, f"recorded at step {step} of {target}", state.credit)
    count = prompts or state.batch_size or config.training.batch_size
    choice = PromptChoice(config, parts.prompts)
    choice.load_state_dict(state.sampler)
    indices = choice.indices(step, count, state.seed)
    chosen = choice.take(step, state.cursor, count, state.seed, indices)
    plan = training_plan(config.training)
    say(f"Sampling {len(chosen)} prompts x {plan.group_size} ...")
    parts.backend.engine.sync(parts.backend.save_adapter, step)
    with Interrupts() as interrupts:
        watcher = Watcher(check=interrupts.check, completion=lambda _: None)
        drawn = parts.sampler.draw(chosen, step, plan, watcher).usable_groups
    parts.backend.engine.sleep()
    if not drawn:
        raise ConfigurationError(
            f"no completion of step {step} could be judged, so no arm has a gradient; see [reward]."
        )
    return Batch(drawn, step, f"drawn for step {step} of {target}", state.credit)


def reads_texts(arms: Sequence[Arm]) -> bool:
    """Return True if an arm names a plugin or a teacher; which may read texts that records lack."""
    return any(named_code(arm.config) or arm.config.algorithm.reference for arm in arms)


def flat_logprobs(groups: Sequence[Group]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[n] log-probs of all sampled tokens."""
    parts = [one.logprobs for group in groups for one in group.trajectories]
    return np.concatenate(parts).astype(np.float64)

"""One step's token file, completion by completion, and the same completions under other transforms.

Another transform is computed by the credit pipeline of training, from the token ids, log-probs, entropies and rewards that the file holds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from retrain.advantages.algorithms import recipe_of
from retrain.advantages.pipeline import CreditPipeline
from retrain.advantages.sepa import linear_lambda
from retrain.advantages.uncertainty import surprisal
from retrain.analysis.runs import StoredRun, read_metrics
from retrain.config import TrainConfig, replaced
from retrain.config.names import condition_label
from retrain.errors import ConfigurationError
from retrain.model.text import load_tokenizer
from retrain.model.vocabulary import TokenIds, VocabularyTable
from retrain.records.run_folder import RunFolder
from retrain.records.token_table import TokenTable, read_tokens
from retrain.types import Completion, Example, FinishReason, Float32Array, Group, Prompt, Score, Scored

if TYPE_CHECKING:
    from retrain.config.schema import Model


class Pieces:
    """The vocabulary of a run's model. Raises EnvironmentFailure where its tokenizer cannot be had."""

    def __init__(self, model: "Model") -> None:
        self._tokenizer = load_tokenizer(model.model, model.revision)  # whoever looks at a run trusts no code that it names
        self.vocabulary = VocabularyTable(self._tokenizer)

    def of(self, token_ids: TokenIds) -> list[str]:
        """[T] one string a token. A special token, which adds nothing to a text, is its name; an unfinished code point is ""."""
        pieces = self.vocabulary.pieces(token_ids)
        return [piece or self._name(int(token)) for piece, token in zip(pieces, token_ids, strict=True)]

    def _name(self, token: int) -> str:
        if self.vocabulary.token_bytes(token):
            return ""
        name = self._tokenizer.convert_ids_to_tokens(token)
        return str(name) if name else f"<{token}>"


@dataclass(frozen=True)
class CompletionCredit:
    """One completion of T tokens."""

    slot: int
    """The prompt's place in the step."""
    sample: int
    reward: float | None
    """None where the file is of a version that did not store it; `truncated` and `log_ratios` too."""
    truncated: bool | None
    token_ids: npt.NDArray[np.int32]
    pieces: list[str]
    """[T] the text of each token; a special token under its name."""
    surprisals: npt.NDArray[np.float64]
    """[T] nats."""
    entropies: Float32Array | None
    """[T] nats; None where the engine recorded none."""
    planning: npt.NDArray[np.bool_] | None
    """[T] inside a planning phrase; None where no condition looked for them."""
    log_ratios: Float32Array | None
    """[T] learner - sampler log-prob before the step; None where the completion was not trained on."""
    kept: npt.NDArray[np.int32] | None
    """[T] how many tokens each one was drawn from; None where the sampled distribution was not truncated."""
    stages: Mapping[str, Mapping[str, Float32Array]]
    """Condition -> stage -> [T] advantages, in the order in which the stages were applied."""

    def advantages(self, label: str) -> Float32Array:
        """[T] as the loss takes them."""
        return list(self.stages[label].values())[-1]


@dataclass(frozen=True)
class StepCredit:
    """One step with what one or more conditions give its n tokens; texts are decoded when they are asked for."""

    step: int
    stages: Mapping[str, Mapping[str, Float32Array]]
    """Condition -> stage -> [n]; the run's own condition comes first."""
    table: TokenTable
    planning: npt.NDArray[np.bool_] | None
    """[n]"""
    pieces: Pieces
    notes: Sequence[str]

    @property
    def labels(self) -> list[str]:
        return list(self.stages)

    @cached_property
    def slots(self) -> list[int]:
        """The prompts' places in the step, in their order."""
        return list(dict.fromkeys(self.table.slot.tolist()))

    def finals(self) -> dict[str, Float32Array]:
        """Condition -> [n] advantages as the loss takes them."""
        return {label: list(stages.values())[-1] for label, stages in self.stages.items()}

    def of_slot(self, slot: int) -> list[int]:
        """The numbers of a prompt's completions."""
        return np.flatnonzero(self.table.slot == slot).tolist()

    def liveliest_slot(self) -> int:
        """The first prompt whose tokens were given the largest advantages in the run's own condition: the one with most to see."""
        sizes = np.abs(self.finals()[self.labels[0]])
        offsets = self.table.offsets
        largest = {slot: max(float(sizes[offsets[i] : offsets[i + 1]].max(initial=0.0)) for i in self.of_slot(slot)) for slot in self.slots}
        return max(self.slots, key=lambda slot: largest[slot])

    def prompt(self, slot: int) -> str | None:
        """The prompt as the model saw it, special tokens under their names; None where the file does not hold it."""
        table = self.table
        if table.prompt_offsets is None or table.prompt_token_ids is None:
            return None
        number = self.slots.index(slot)
        return "".join(self.pieces.of(table.prompt_token_ids[table.prompt_offsets[number] : table.prompt_offsets[number + 1]]))

    def completion(self, number: int) -> CompletionCredit:
        table = self.table
        part = slice(int(table.offsets[number]), int(table.offsets[number + 1]))
        ratios = table.log_ratios[part] if table.log_ratios is not None else None
        return CompletionCredit(
            slot=int(table.slot[number]),
            sample=int(table.sample[number]),
            reward=float(table.rewards[number]) if table.rewards is not None else None,
            truncated=bool(table.truncated[number]) if table.truncated is not None else None,
            token_ids=table.token_ids[part],
            pieces=self.pieces.of(table.token_ids[part]),
            surprisals=surprisal(table.logprobs[part]),
            entropies=table.entropies[part] if table.entropies is not None else None,
            planning=self.planning[part] if self.planning is not None else None,
            log_ratios=ratios if ratios is not None and not np.isnan(ratios).any() else None,
            kept=table.kept[part] if table.kept is not None else None,
            stages={label: {stage: values[part] for stage, values in stages.items()} for label, stages in self.stages.items()},
        )


def stored_steps(folder: RunFolder) -> list[int]:
    """The steps whose tokens a run stored, rising."""
    numbers = [path.stem.removeprefix("step_") for path in folder.tokens.glob("step_*.safetensors")]
    return sorted(int(number) for number in numbers if number.isdecimal())


def read_step(run: StoredRun, step: int | None = None, against: Sequence[str] = ()) -> StepCredit:
    """A step of `run`, by default the last that was stored, with the transforms of `against` beside its own condition.

    Each of these is a transform, or "advantage+transform". Raises ConfigurationError for a step or a condition that is not there,
    EnvironmentFailure where the model's tokenizer cannot be had.
    """
    step = _chosen_step(run, step)
    table = read_tokens(run.folder.step_tokens(step))
    pieces = Pieces(run.config.model)
    stages: dict[str, Mapping[str, Float32Array]] = {run.condition: table.advantages}
    planning = table.mask.astype(np.bool_) if table.mask is not None else None
    notes: list[str] = []
    for name in against:
        config = _under(run.config, name)
        pipeline = CreditPipeline(config, pieces.vocabulary.pieces)
        sepa_lambda = _sepa_lambda(run, step, notes) if pipeline.uses_sepa_controller else 0.0
        credit = pipeline.assign(_groups(run, table), step, sepa_lambda)
        label = condition_label(config.algorithm.advantage_mode, config.algorithm.transform_mode)
        stages[f"{label} (computed)" if label in stages else label] = credit.stages_float32()
        if planning is None and pipeline.needs_planning:
            planning = credit.tokens.planning
    return StepCredit(step, stages, table, planning, pieces, tuple(dict.fromkeys(notes)))


def _chosen_step(run: StoredRun, step: int | None) -> int:
    steps = stored_steps(run.folder)
    if not steps:
        raise ConfigurationError(
            f"{run.path} holds no tokens to inspect; train with [logging] tokens_every = 1 (--tokens-every 1) to store those of every step."
        )
    if step is None:
        return steps[-1]
    if step not in steps:
        raise ConfigurationError(f"--step {step} has no tokens in {run.folder.tokens}; the steps that have are {_listed(steps)}.")
    return step


def _listed(steps: Sequence[int]) -> str:
    shown = [str(step) for step in steps]
    return ", ".join(shown if len(shown) <= 8 else [*shown[:4], "...", *shown[-2:]])


# -- other transforms on the same completions ----------------------------------------------------------------------------

_NO_PROMPT = Prompt(Example(prompt="", reference=""), "", np.zeros(0, np.int32))
"""Credit assignment does not read it."""


def _under(config: TrainConfig, name: str) -> TrainConfig:
    """The run's configuration with another transform, and another advantage where the name has one."""
    advantage, _, transform = name.rpartition("+")
    recipe = recipe_of(config.algorithm)
    if not advantage and recipe is None:
        raise ConfigurationError(
            f"--against {name}: the run's algorithm_mode = {config.algorithm.algorithm_mode!r} has no advantage_mode to keep; "
            f"name one, as in --against maxrl+{name}."
        )
    changes = {
        "algorithm.algorithm_mode": "",
        "algorithm.advantage_mode": advantage or (recipe.advantage if recipe else ""),
        "algorithm.transform_mode": transform,
        "algorithm.transform_params": {},  # they are those of the run's own transform
        "algorithm.uncertainty_kind": str(config.algorithm.transform_params.get("uncertainty_kind", config.algorithm.uncertainty_kind)),
    }
    if advantage:
        changes["algorithm.advantage_params"] = {}
    return replaced(config, changes, origin="--against")


def _sepa_lambda(run: StoredRun, step: int, notes: list[str]) -> float:
    """What the run used at the step, or what its [sepa] section would have given a run that follows it."""
    recorded = read_metrics(run.folder.metrics, ("step", "sepa_lambda")).to_pylist()
    value = next((row["sepa_lambda"] for row in recorded if row["step"] == step), None)
    if value is not None:
        return float(value)
    ramp = linear_lambda(run.config.sepa, step)
    notes.append(f"The run did not use SEPA: lambda is {ramp:g}, which [sepa]'s linear ramp gives at step {step} with its gate open.")
    return ramp


def _groups(run: StoredRun, table: TokenTable) -> list[Group]:
    """The judged groups of the step, as credit assignment got them."""
    if table.rewards is None or table.truncated is None:
        raise ConfigurationError(
            f"{run.folder.tokens} was written by an earlier version, without rewards, so --against has nothing to start from; "
            "train anew with [logging] tokens_every to store them."
        )
    threshold = run.config.reward.correct_threshold
    groups: dict[int, Group] = {}
    for number, (slot, sample) in enumerate(zip(table.slot.tolist(), table.sample.tolist(), strict=True)):
        part = slice(int(table.offsets[number]), int(table.offsets[number + 1]))
        reward = float(table.rewards[number])
        group = groups.setdefault(slot, Group(_NO_PROMPT, slot, []))
        completion = Completion(
            request=slot,
            sample=sample,
            token_ids=table.token_ids[part],
            logprobs=table.logprobs[part],
            entropies=table.entropies[part] if table.entropies is not None else None,
            finish_reason=FinishReason.LENGTH if table.truncated[number] else FinishReason.STOP,
            kept=table.kept[part] if table.kept is not None else None,
        )
        group.members.append(Scored(completion, "", Score.of(reward, threshold)))
    return list(groups.values())

"""Compute the credit of one step, completion by completion, from its token file; also under other
transforms.

The training credit pipeline computes another transform from the stored token ids, log-probs,
entropies and rewards.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from retrain.advantages.pipeline import CreditPipeline
from retrain.advantages.planning import RegexDetector, SemanticDetector
from retrain.advantages.sepa import linear_lambda
from retrain.advantages.transforms import surprisal
from retrain.analysis.runs import StoredRun
from retrain.config import TrainConfig, replaced
from retrain.config.load import trusted
from retrain.config.names import condition_label
from retrain.errors import ConfigurationError
from retrain.model.sentences import load_sentence_encoder
from retrain.model.text import load_tokenizer, placed
from retrain.model.vocabulary import TokenIds, VocabularyTable
from retrain.plugins import ForeignCode
from retrain.records.entries import StepRecord
from retrain.records.run_folder import RunFolder
from retrain.records.token_table import TokenTable, read_tokens
from retrain.types import (
    Completion,
    Example,
    FinishReason,
    Float32Array,
    Group,
    Int32Array,
    Prompt,
    Score,
    Scored,
    Trajectory,
    Turn,
)

if TYPE_CHECKING:
    from retrain.config.schema import Model, Planning


_Scalar = TypeVar("_Scalar", bound=np.generic)


class Pieces:
    """The text of tokens under a run's tokenizer. Raises EnvironmentFailure if the tokenizer cannot
    load.
    """

    def __init__(self, model: "Model") -> None:
        # This executes no code that the run names.
        self._tokenizer = load_tokenizer(model.model, model.revision)
        self.vocabulary = VocabularyTable(self._tokenizer)

    def of(self, token_ids: TokenIds) -> list[str]:
        """Return [T] one string per token: a special token's name, "" for a part of an unfinished
        code point.
        """
        pieces = self.vocabulary.pieces(token_ids)
        return [
            piece or self._name(int(token)) for piece, token in zip(pieces, token_ids, strict=True)
        ]

    def _name(self, token: int) -> str:
        if self.vocabulary.token_bytes(token):
            return ""
        name = self._tokenizer.convert_ids_to_tokens(token)
        if name:
            return str(name)
        return f"<{token}>"


@dataclass(frozen=True)
class TurnText:
    """The place at which a reply begins, and the environment's text before it."""

    start: int
    """The place of the reply's first token among the T tokens."""
    context: str
    """The text of the context, with the names of special tokens; "" in a first turn, whose context
    is the prompt."""
    restarts: bool
    """`context` is all that the model saw."""


@dataclass(frozen=True)
class CompletionCredit:
    """One completion, or the replies of one trajectory, of T tokens with everything known about
    each.
    """

    slot: int
    """The prompt's index in the step."""
    sample: int
    reward: float | None
    """The reward; None in files of older versions, like `truncated` and `log_ratios`."""
    truncated: bool | None
    token_ids: npt.NDArray[np.int32]
    pieces: list[str]
    """[T] the text of each token; special tokens have names."""
    surprisals: npt.NDArray[np.float64]
    """[T] nats."""
    entropies: Float32Array | None
    """[T] nats; None if the engine recorded none."""
    planning: npt.NDArray[np.bool_] | None
    """[T] True inside a planning phrase; None if no condition looks for them."""
    detectors: Mapping[str, npt.NDArray[np.bool_]]
    """Detector -> [T] its mask, where `read_step` compares the detectors."""
    log_ratios: Float32Array | None
    """[T] learner minus sampler log-prob before the step; None if the step did not train on the
    completion.
    """
    kept: npt.NDArray[np.int32] | None
    """[T] size of the truncated distribution of each sampled token; None without truncation."""
    stages: Mapping[str, Mapping[str, Float32Array]]
    """Condition -> stage -> [T] advantages, stages in the order of their application."""
    turns: Sequence[TurnText]
    """Empty if the trajectory is one reply to its prompt."""

    def advantages(self, label: str) -> Float32Array:
        """Return the advantages [T] as the loss uses them."""
        return list(self.stages[label].values())[-1]


@dataclass(frozen=True)
class StepCredit:
    """The n tokens of one step and their advantages under one or more conditions; it decodes texts
    on demand.
    """

    step: int
    stages: Mapping[str, Mapping[str, Float32Array]]
    """Condition -> stage -> [n]; the run's own condition comes first."""
    table: TokenTable
    planning: npt.NDArray[np.bool_] | None
    """[n]"""
    pieces: Pieces
    notes: Sequence[str]
    detectors: Mapping[str, npt.NDArray[np.bool_]] = field(default_factory=dict)
    """Detector -> [n] its mask; empty unless `read_step` compares the detectors."""

    @property
    def labels(self) -> list[str]:
        return list(self.stages)

    @cached_property
    def slots(self) -> list[int]:
        """The prompts' indices in the step, in order."""
        return list(dict.fromkeys(self.table.slot.tolist()))

    def finals(self) -> dict[str, Float32Array]:
        """Map each condition to [n] advantages as the loss uses them."""
        return {label: list(stages.values())[-1] for label, stages in self.stages.items()}

    def of_slot(self, slot: int) -> list[int]:
        """Return the indices of a prompt's completions."""
        return np.flatnonzero(self.table.slot == slot).tolist()

    def liveliest_slot(self) -> int:
        """Return the prompt with the largest advantage under the run's own condition."""
        sizes = np.abs(self.finals()[self.labels[0]])
        slots = np.repeat(self.table.slot, np.diff(self.table.offsets))
        return int(slots[sizes.argmax()]) if len(slots) else self.slots[0]

    def prompt(self, slot: int) -> str | None:
        """Return the prompt as the model saw it, with the names of special tokens; None if the file
        does not store it.
        """
        table = self.table
        if table.prompt_offsets is None or table.prompt_token_ids is None:
            return None
        number = self.slots.index(slot)
        return "".join(
            self.pieces.of(
                table.prompt_token_ids[
                    table.prompt_offsets[number] : table.prompt_offsets[number + 1]
                ]
            )
        )

    def completion(self, number: int) -> CompletionCredit:
        table = self.table
        part = slice(int(table.offsets[number]), int(table.offsets[number + 1]))
        ratios = _part(table.log_ratios, part)
        return CompletionCredit(
            slot=int(table.slot[number]),
            sample=int(table.sample[number]),
            reward=float(table.rewards[number]) if table.rewards is not None else None,
            truncated=bool(table.truncated[number]) if table.truncated is not None else None,
            token_ids=table.token_ids[part],
            pieces=self.pieces.of(table.token_ids[part]),
            surprisals=surprisal(table.logprobs[part]),
            entropies=_part(table.entropies, part),
            planning=_part(self.planning, part),
            detectors={name: mask[part] for name, mask in self.detectors.items()},
            log_ratios=None if ratios is None or np.isnan(ratios).any() else ratios,
            kept=_part(table.kept, part),
            stages={
                label: {stage: values[part] for stage, values in stages.items()}
                for label, stages in self.stages.items()
            },
            turns=[
                TurnText(start, "".join(self.pieces.of(context)), restarts)
                for start, _, context, restarts in turns_of(table, number)
            ],
        )


def _part(values: npt.NDArray[_Scalar] | None, part: slice) -> npt.NDArray[_Scalar] | None:
    return None if values is None else values[part]


def stored_steps(folder: RunFolder) -> list[int]:
    """Return the steps whose tokens a run stored, in increasing order."""
    numbers = [path.stem.removeprefix("step_") for path in folder.tokens.glob("step_*.safetensors")]
    return sorted(int(number) for number in numbers if number.isdecimal())


def read_step(
    run: StoredRun,
    step: int | None = None,
    against: Sequence[str] = (),
    *,
    detectors: bool = False,
    planning_model: str = "",
    trust: bool = False,
) -> StepCredit:
    """Return a step of `run`, by default the last stored step, under its own condition and the
    conditions in `against`.

    Each of `against` is a transform or "advantage+transform". With `detectors`, compute the masks
    of both planning detectors. The sentence encoder is `planning_model`, or the run's own if that
    is empty. With `trust`, load the plugins that the run names.

    Raises ConfigurationError for an unknown step or condition, EnvironmentFailure if the model's
    tokenizer cannot load.
    """
    step = _chosen_step(run, step)
    table = read_tokens(run.folder.step_tokens(step))
    if not len(table.slot):
        raise NoJudgedCompletion(
            f"Step {step} of {run.path} has no judged completion, so it has no credit to show;"
            " choose another --step. The reasons are in trainer_state.json under rewards."
        )
    pieces = Pieces(placed(run.config).model)
    stages: dict[str, Mapping[str, Float32Array]] = {run.condition: table.advantages}
    planning = table.mask.astype(np.bool_) if table.mask is not None else None
    notes: list[str] = []
    own = run.config_at(step)
    if trust:
        own = trusted(own)
    # The file stores the run's own credit; this computes any other from the stored tokens.
    for name in against:
        config = _under(own, name)
        pipeline = _pipeline(config, name, pieces)
        sepa_lambda = _sepa_lambda(run, step, notes) if pipeline.uses_sepa_controller else 0.0
        credit = pipeline.assign(_groups(run, table), step, sepa_lambda)
        label = condition_label(config.algorithm.advantage_mode, config.algorithm.transform_mode)
        notes += _begun_anew(pipeline, label, step)
        stages[f"{label} (computed)" if label in stages else label] = credit.stages_float32()
        if planning is None and pipeline.needs_planning:
            planning = credit.tokens.planning
    masks = {}
    if detectors:
        masks = _detected(run.config.planning, table, pieces, planning_model)
    if masks:
        notes.append(agreement(masks))
    return StepCredit(step, stages, table, planning, pieces, tuple(dict.fromkeys(notes)), masks)


def _pipeline(config: TrainConfig, name: str, pieces: Pieces) -> CreditPipeline:
    try:
        return CreditPipeline(config, pieces.vocabulary.pieces, load_sentence_encoder)
    except ForeignCode as error:
        if "." not in name:  # The code belongs to the run.
            raise
        raise ForeignCode(
            f"--against {name} names code that may come from the run's folder, and looking at a"
            " run does not execute code. Read the code first, then add --trust."
        ) from error


def _begun_anew(pipeline: CreditPipeline, label: str, step: int) -> Iterator[str]:
    if pipeline.keeps_state and step:
        yield (
            f"{label} has a state that the tokens do not store, so its credit is as if step"
            f" {step} were its first."
        )


class NoJudgedCompletion(ConfigurationError):
    """The reward judged none of the step's completions, so they have no credit to show."""


def _chosen_step(run: StoredRun, step: int | None) -> int:
    steps = stored_steps(run.folder)
    if not steps and not run.config.training.max_steps:
        raise ConfigurationError(
            f"{run.path} has a supervised stage alone, which has no token credit to inspect."
        )
    if not steps:
        raise ConfigurationError(
            f"{run.path} holds no tokens to inspect, since no step has ended or an earlier"
            " version wrote it. Train with [logging] tokens_every = 1 (--tokens-every 1) to"
            " store every step."
        )
    if step is None:
        return steps[-1]
    if step not in steps:
        shown = ", ".join(map(str, steps[:8])) + f", ... {steps[-1]}" * (len(steps) > 8)
        raise ConfigurationError(
            f"--step {step} has no tokens in {run.folder.tokens}; the stored steps are {shown}."
        )
    return step


# -- both planning detectors -----------------------------------------------------------------------


def _detected(
    planning: "Planning", table: TokenTable, pieces: Pieces, model: str
) -> dict[str, npt.NDArray[np.bool_]]:
    """Map each detector to its mask [n], with the run's own phrases, threshold and least
    similarity.
    """
    ends = table.offsets.tolist()
    completions = [
        pieces.vocabulary.pieces(table.token_ids[start:stop]) for start, stop in pairwise(ends)
    ]
    encode = load_sentence_encoder(model or planning.model)
    detectors: dict[str, RegexDetector | SemanticDetector] = {
        "regex": RegexDetector(planning.grams),
        "semantic": SemanticDetector(encode, planning.threshold, planning.min_similarity),
    }
    return {
        name: (
            np.concatenate([np.zeros(0, np.uint8), *detector.detect_all(completions)]).astype(
                np.bool_
            )
        )
        for name, detector in detectors.items()
    }


def agreement(masks: Mapping[str, npt.NDArray[np.bool_]]) -> str:
    """Return the share of tokens on which two masks [n] agree, and Cohen's kappa.

    Kappa is the agreement beyond what two independent masks of the same rates would have.
    """
    (one, first), (two, second) = masks.items()
    if not len(first):
        return "The step has no tokens to compare the planning detectors on."
    rates, same = (float(first.mean()), float(second.mean())), float((first == second).mean())
    by_chance = rates[0] * rates[1] + (1 - rates[0]) * (1 - rates[1])
    if by_chance < 1:
        kappa = f"Cohen's kappa {(same - by_chance) / (1 - by_chance):.2f}"
    else:
        kappa = "nothing to tell apart"
    return (
        f"Planning tokens of {len(first):,}: {one} {rates[0]:.1%}, {two} {rates[1]:.1%}, both"
        f" {float((first & second).mean()):.1%}; the detectors agree on {same:.1%} of the tokens"
        f" ({kappa})."
    )


# -- other transforms on the same completions ------------------------------------------------------

_NO_PROMPT = Prompt(Example(prompt="", reference=""), "", np.zeros(0, np.int32))
"""An empty prompt for the groups, since credit assignment does not read the prompt."""


def _under(config: TrainConfig, name: str) -> TrainConfig:
    """Return the run's configuration with another transform, and with another advantage if `name`
    gives one.
    """
    advantage, _, transform = name.rpartition("+")
    own, _ = config.algorithm.modes
    if not (advantage or own):
        raise ConfigurationError(
            f"--against {name}: the run's algorithm_mode = {config.algorithm.algorithm_mode!r}"
            f" has no advantage_mode to keep. Name one, as in --against maxrl+{name}."
        )
    changes = {
        "algorithm.algorithm_mode": "",
        "algorithm.advantage_mode": advantage or own,
        "algorithm.transform_mode": transform,
        # These belong to the run's own transform.
        "algorithm.transform_params": {},
        "algorithm.uncertainty_kind": config.algorithm.uncertainty,
        # The step's values are in their places, and a schedule may name a parameter that is gone.
        "schedule.points": {},
    }
    if advantage not in ("", own):
        changes["algorithm.advantage_params"] = {}
    return replaced(config, changes, origin="--against")


def _sepa_lambda(run: StoredRun, step: int, notes: list[str]) -> float:
    """Return the lambda that the run used at the step, or else the lambda on the linear ramp of its
    [sepa] section.
    """
    records = StepRecord.read(run.folder.metrics)
    value = next((one.sepa_lambda for one in records if one.step == step), None)
    if value is not None:
        return value
    ramp = linear_lambda(run.config.sepa, step)
    notes.append(
        f"The run did not use SEPA: lambda is {ramp:g}, which [sepa]'s linear ramp gives at step"
        f" {step} with its gate open."
    )
    return ramp


def _groups(run: StoredRun, table: TokenTable) -> list[Group]:
    """Return the judged groups of the step, as credit assignment received them; examples and texts
    are absent from the token file.
    """
    if table.rewards is None or table.truncated is None:
        raise ConfigurationError(
            f"{run.folder.tokens} comes from an earlier version, which did not store the"
            " rewards that --against needs; train again with [logging] tokens_every."
        )
    threshold = run.config.reward.correct_threshold
    groups: dict[int, Group] = {}
    for number, (slot, sample) in enumerate(
        zip(table.slot.tolist(), table.sample.tolist(), strict=True)
    ):
        reward = float(table.rewards[number])
        group = groups.setdefault(slot, Group(_NO_PROMPT, slot, []))
        group.members.append(
            Scored(_trajectory(table, number, sample), "", Score.of(reward, threshold))
        )
    return list(groups.values())


def turns_of(table: TokenTable, number: int) -> list[tuple[int, int, Int32Array, bool]]:
    """Return (start, stop, context, restarts) of each turn of a trajectory, counted from its first
    token; empty for one reply to its prompt.
    """
    turns = table.turns
    if turns is None:
        return []
    found, start = [], 0
    for turn in range(int(turns.offsets[number]), int(turns.offsets[number + 1])):
        stop = start + int(turns.actions[turn])
        context = turns.context_token_ids[
            turns.context_offsets[turn] : turns.context_offsets[turn + 1]
        ]
        found.append((start, stop, context, bool(turns.restarts[turn])))
        start = stop
    return found


def _trajectory(table: TokenTable, number: int, sample: int) -> Trajectory:
    first, last = int(table.offsets[number]), int(table.offsets[number + 1])
    assert table.truncated is not None
    reason = FinishReason.LENGTH if table.truncated[number] else FinishReason.STOP

    def completion(start: int, stop: int) -> Completion:
        part = slice(first + start, first + stop)
        return Completion(
            request=0,
            sample=sample,
            token_ids=table.token_ids[part],
            logprobs=table.logprobs[part],
            entropies=_part(table.entropies, part),
            finish_reason=reason,
            kept=_part(table.kept, part),
        )

    turns = turns_of(table, number) or [(0, last - first, np.zeros(0, np.int32), False)]
    return Trajectory(
        tuple(
            Turn(completion(start, stop), context, restarts)
            for start, stop, context, restarts in turns
        )
    )

"""Build the record of a step: the numbers of rollout, credit, learning and machine under the names
of the record's fields.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, compress
from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt

from retrain.advantages.credit import Credit
from retrain.records.entries import GenerationRecord
from retrain.records.token_table import TokenTable, TurnTable
from retrain.run.identical import chance_of_identical
from retrain.run.rollout import Rollout
from retrain.system import grouped, peak_resident_bytes
from retrain.types import (
    FinishReason,
    Float32Array,
    Group,
    Int32Array,
    JudgeUsage,
    Row,
    RowKey,
    Scored,
    StepResult,
    Trajectory,
    joined_or_none,
)

BoxReader = Callable[[str, str], str | None]
"""Text of a completion -> the answer in its last box, or None."""


class StepClock:
    """A monotonic clock for the phases of one step, from `StepClock(first phase)` to `stop`."""

    def __init__(self, phase: str) -> None:
        self.seconds: dict[str, float] = {}
        self._phase, self._since = phase, monotonic()

    def mark(self, phase: str) -> None:
        """End one phase and begin another."""
        now = monotonic()
        self.seconds[self._phase] = now - self._since
        self._phase, self._since = phase, now

    def stop(self) -> None:
        self.mark("")

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Step:
    """Everything about one finished step, from sampling to learning, for `StepObserver`."""

    number: int
    """The step's number, counted from 0."""
    rollout: Rollout
    sepa_lambda: float
    credit: Credit
    rows: list[Row]
    """One entry per judged completion, in the order of `credit.sources`."""
    log_ratios: Mapping[RowKey, Float32Array] | None
    """[T] of each row, learner - sampler log-prob before the step; None if no sink stores the
    tokens.
    """
    result: StepResult
    clock: StepClock


def reward_fields(
    rollout: Rollout, boxes: BoxReader | None = None, learners_entropy: float | None = None
) -> dict[str, Any]:
    """Return statistics over the first draw of every prompt, skipped groups included. `boxes` finds
    the answer in a completion; None if the reward does not. If the engine records no entropy, the
    learner's replaces it.

    Rewards select the redraws, so the last draws would bias the statistics. Over all draws, a
    prompt would weigh more the more draws it has, that is, the nearer its success rate is to 0 or
    1.
    """
    members = list(chain.from_iterable(group.members for group in rollout.first_draws))
    trajectories = [member.trajectory for member in members]
    is_cut = [one.finish_reason is FinishReason.LENGTH for one in trajectories]
    rewards = _rewards(members)
    entropy = _token_mean([one.entropies for one in trajectories])
    found = [
        boxes(member.text, group.prompt.text) is not None
        for group in rollout.first_draws
        for member in group.members
        if boxes
    ]
    return {
        "correct_rate": rollout.correct_rate,
        "mean_reward": mean_or_none(rewards),
        "reward_std": _deviation(rewards),
        "truncated_fraction": mean_or_none(is_cut),
        "truncated_reward_mean": mean_or_none(_rewards(compress(members, is_cut))),
        "completion_tokens_mean": mean_or_none([one.num_actions for one in trajectories]),
        "length_reward_z": _length_reward_z(rollout.first_draws),
        "entropy_mean": learners_entropy if entropy is None else entropy,
        "surprisal_mean": _token_mean([-one.logprobs for one in trajectories]),
        "answer_found_rate": mean_or_none(found),
        "groups_identical": sum(map(_is_identical, rollout.first_draws)),
    }


def _length_reward_z(groups: Iterable[Group]) -> float | None:
    """Return the covariance of length and reward, summed over groups, in standard deviations of
    what shuffled rewards give; None if it cannot differ from 0.
    """
    moment = variance = 0.0
    for group in groups:
        own = group.judged()
        if len(set(own.rewards)) > 1:
            lengths = [one.num_actions for one in own.trajectories]
            (length, both), (_, reward) = np.cov(lengths, own.rewards) * (len(own) - 1)
            moment += both
            variance += length * reward / (len(own) - 1)
    return float(moment / variance**0.5) if variance else None


def _rewards(members: Iterable[Scored]) -> list[float]:
    return [one.score.reward for one in members if one.score.reward is not None]


def _deviation(rewards: Sequence[float]) -> float | None:
    """Return the standard deviation, exactly 0 if all rewards are equal; None without any."""
    if not rewards:
        return None
    return float(np.std(rewards)) if min(rewards) < max(rewards) else 0.0


def _token_mean(rows: Sequence[Float32Array | None]) -> float | None:
    """Return the mean over all tokens; None without any, or if a completion has no values."""
    values = joined_or_none(rows)
    if values is None or not len(values):
        return None
    return float(values.mean(dtype=np.float64))


def _is_identical(group: Group) -> bool:
    written = {trajectory.token_ids.tobytes() for trajectory in group.trajectories}
    return len(group) > 1 == len(written)


def result_fields(result: StepResult) -> dict[str, Any]:
    """Return the learner's report under the names of the record, which equal its own."""
    fields = asdict(result)
    del fields["updates"], fields["nonfinite_tensor"]  # Only the screen shows them.
    del fields["entropy_mean"]  # `reward_fields` takes it.
    return fields | {
        "loss": None if result.loss_is_placeholder else result.loss,
        "reported_loss": result.loss,
    }


def identical_chance(groups: Sequence[Group]) -> float:
    """Return a bound on the chance that so many trajectories of a group are identical; all draws of
    a prompt are one group.
    """
    drawn = grouped(
        (group.slot, (one.token_ids, one.logprobs))
        for group in groups
        for one in group.trajectories
    )
    return chance_of_identical(drawn.values())


def credit_fields(credit: Credit, dropped_groups: int) -> dict[str, Any]:
    """Return what credit assignment reports, over all groups of the step. The reward could not
    judge `dropped_groups`, so they count as skipped for a reason other than their rewards.
    """
    fields = asdict(credit.statistics)
    fields["groups_skipped_other"] += dropped_groups
    groups = len(credit.groups) + dropped_groups
    if groups:
        fields["informative_fraction"] = sum(group.informative for group in credit.groups) / groups
    return fields


def task_fields(rollout: Rollout) -> dict[str, float]:
    """Return the numbers of each source of a mixture, over the first draw of every prompt."""
    groups = grouped((group.prompt.example.task, group) for group in rollout.first_draws)
    found: dict[str, float] = {}
    for task, own in sorted(groups.items()):
        rewards = list(chain.from_iterable(group.rewards for group in own))
        found[f"prompts/{task}"] = len(own)
        if rewards:
            found[f"reward/{task}"] = float(np.mean(rewards))
            found[f"correct/{task}"] = sum(group.correct for group in own) / len(rewards)
    return found


def judge_fields(groups: Iterable[Group]) -> dict[str, Any]:
    """Return the judge's usage for these groups, as the judge_ fields of their record; nothing
    without a judge.
    """
    usages = [
        member.score.usage
        for group in groups
        for member in group.members
        if member.score.usage is not None
    ]
    if usages:
        return {f"judge_{name}": value for name, value in asdict(sum(usages, JudgeUsage())).items()}
    return {}


def environment_fields(rollout: Rollout) -> dict[str, Any]:
    """Return what the environment reports, over the first draw of every prompt."""
    members = list(chain.from_iterable(group.members for group in rollout.first_draws))
    measured: dict[str, list[float]] = {}
    for member in members:
        by_turn = {
            f"turn_reward_{number}": value for number, value in enumerate(member.score.turn_rewards)
        }
        for name, value in (*member.score.metrics.items(), *by_turn.items()):
            measured.setdefault(name, []).append(value)
    return {
        "turns_mean": mean_or_none([len(member.trajectory.turns) for member in members]),
        "trajectories_rewritten": sum(len(member.trajectory.parts()) > 1 for member in members),
        "environment_metrics": {
            name: float(np.mean(values)) for name, values in sorted(measured.items())
        },
    }


def generation_records(
    step: int, groups: Sequence[Group], credit: Credit, *, in_turns: bool = False
) -> list[GenerationRecord]:
    """Return every trajectory of the step as text, with its advantage; with `in_turns` also what
    its environment reports about it.
    """
    # Only judged groups have advantages: a completion outside of them has none.
    advantages = {
        (source.slot, trajectory.sample): advantage
        for source, given in zip(credit.sources, credit.groups, strict=True)
        for trajectory, advantage in zip(source.trajectories, given.advantages, strict=True)
    }
    return [
        GenerationRecord(
            step=step,
            prompt_id=group.prompt.prompt_id,
            sample=member.trajectory.sample,
            prompt=group.prompt.text,
            completion=member.text,
            reward=member.score.reward,
            outcome=member.score.outcome.value,
            advantage=advantages.get((group.slot, member.trajectory.sample)),
            finish_reason=member.trajectory.finish_reason.value,
            num_tokens=member.trajectory.num_actions,
            turns=len(member.trajectory.turns) if in_turns else None,
            turn_rewards=list(member.score.turn_rewards) if in_turns else None,
            metrics=dict(member.score.metrics) if in_turns else None,
        )
        for group in groups
        for member in group.members
    ]


def token_table(
    credit: Credit, with_planning: bool, log_ratios: Mapping[RowKey, Float32Array] | None = None
) -> TokenTable:
    """Collect every judged token of the step with its advantage after each stage. `log_ratios` maps
    row keys to [T] for the trained rows; the tokens of other rows have NaN.
    """
    tokens, entropies = credit.tokens, credit.tokens.entropies
    prompts = [group.prompt.token_ids for group in credit.sources]
    slots = [group.slot for group in credit.sources for _ in group.trajectories]
    trajectories = list(chain.from_iterable(group.trajectories for group in credit.sources))
    truncated = [one.finish_reason is FinishReason.LENGTH for one in trajectories]
    kept = [one.kept for one in trajectories if one.kept is not None]
    return TokenTable(
        offsets=_offsets(tokens.segments.lengths),
        slot=np.array(slots, np.int32),
        sample=np.array([one.sample for one in trajectories], np.int32),
        token_ids=_joined_ids([one.token_ids for one in trajectories]),
        logprobs=tokens.logprobs.astype(np.float32),
        entropies=None if entropies is None else entropies.astype(np.float32),
        mask=tokens.planning.astype(np.uint8) if with_planning else None,
        advantages=credit.stages_float32(),
        rewards=np.array(list(chain.from_iterable(tokens.rewards)), np.float64),
        truncated=np.array(truncated, np.uint8),
        log_ratios=None if log_ratios is None else _joined_ratios(credit, log_ratios),
        prompt_offsets=_offsets([len(ids) for ids in prompts]),
        prompt_token_ids=_joined_ids(prompts),
        # The array has no gaps: it holds all completions or none.
        kept=np.concatenate(kept) if kept and len(kept) == len(trajectories) else None,
        turns=_turn_table(trajectories),
    )


def _joined_ratios(credit: Credit, log_ratios: Mapping[RowKey, Float32Array]) -> Float32Array:
    """Return [n] log-ratios in the order of the step's tokens; NaN for untrained rows."""
    pieces = [np.zeros(0, np.float32)]
    for number, group in enumerate(credit.sources):
        for trajectory in group.trajectories:
            for part, turns in enumerate(trajectory.parts()):
                length = sum(len(turn.completion.token_ids) for turn in turns)
                unknown = np.full(length, np.nan, np.float32)
                pieces.append(log_ratios.get((number, trajectory.sample, part), unknown))
    return np.concatenate(pieces)


def _offsets(lengths: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Return [N + 1] offsets of N pieces that lie one after the other."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _joined_ids(pieces: Sequence[Int32Array]) -> Int32Array:
    return np.concatenate([np.zeros(0, np.int32), *pieces])


def _turn_table(trajectories: Sequence[Trajectory]) -> TurnTable | None:
    """Return the turns of the trajectories; None if every trajectory is one reply to its prompt."""
    turns = list(chain.from_iterable(trajectory.turns for trajectory in trajectories))
    if len(turns) == len(trajectories) and not any(turn.restarts for turn in turns):
        return None
    return TurnTable(
        offsets=_offsets([len(one.turns) for one in trajectories]),
        actions=np.array([len(turn.completion.token_ids) for turn in turns], np.int32),
        restarts=np.array([turn.restarts for turn in turns], np.uint8),
        context_offsets=_offsets([len(turn.context) for turn in turns]),
        context_token_ids=_joined_ids([turn.context for turn in turns]),
    )


def mean_or_none(values: Sequence[float] | Sequence[int]) -> float | None:
    return float(np.mean(values)) if values else None


def peak_memory_gib(device: str) -> float:
    """Return the peak memory so far: of a CUDA device, elsewhere of this process without its
    workers.
    """
    if device.startswith("cuda"):
        import torch

        return float(torch.cuda.max_memory_allocated(device)) / 2**30
    return peak_resident_bytes() / 2**30

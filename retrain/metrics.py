"""One step's record: the numbers of rollout, credit, learning and machine in the names of StepRecord."""

import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic

import numpy as np

from retrain.checkpoint import TrainerState
from retrain.rollout import Rollout
from retrain.types import FinishReason, Outcome


@dataclass
class StepClock:
    """Monotonic seconds of the phases of one step; `mark` ends one phase and names the next."""

    seconds: dict[str, float] = field(default_factory=dict)
    _phase: str = ""
    _since: float = 0.0

    def start(self) -> None:
        self.seconds = {}
        self._phase, self._since = "sample", monotonic()

    def mark(self, phase: str) -> None:
        now = monotonic()
        self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now

    def stop(self) -> None:
        self.mark("")

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class RewardStatistics:
    """Over all completions of a step, skipped groups included."""

    completions: int
    judged: int
    correct: int
    mean_reward: float | None
    truncated: int
    truncated_reward_mean: float | None
    completion_tokens_mean: float | None

    @property
    def correct_rate(self) -> float | None:
        return self.correct / self.judged if self.judged else None


def reward_statistics(rollout: Rollout) -> RewardStatistics:
    pairs = [pair for group in rollout.groups for pair in zip(group.completions, group.scores, strict=True)]
    rewards = [score.reward for _, score in pairs if score.reward is not None]
    truncated = [score.reward for completion, score in pairs if completion.finish_reason is FinishReason.LENGTH]
    return RewardStatistics(
        completions=len(pairs),
        judged=len(rewards),
        correct=sum(score.outcome is Outcome.RIGHT for _, score in pairs),
        mean_reward=mean_or_none(rewards),
        truncated=len(truncated),
        truncated_reward_mean=mean_or_none([reward for reward in truncated if reward is not None]),
        completion_tokens_mean=mean_or_none([len(completion.token_ids) for completion, _ in pairs]),
    )


def count_into(state: TrainerState, statistics: RewardStatistics, tokens: int, seconds: float) -> None:
    """Add one step to the run's totals."""
    state.correct += statistics.correct
    state.judged += statistics.judged
    state.tokens += tokens
    state.seconds += seconds


def mean_or_none(values: Sequence[float] | Sequence[int]) -> float | None:
    return float(np.mean(values)) if values else None


def peak_memory_gib(device: str) -> float:
    """Peak memory so far: of the device for CUDA, of the process elsewhere."""
    if device.startswith("cuda"):
        import torch

        return float(torch.cuda.max_memory_allocated(device)) / 2**30
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes * (1 if sys.platform == "darwin" else 1024) / 2**30

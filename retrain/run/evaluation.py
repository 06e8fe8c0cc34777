"""Held-out evaluation during a run: the held-out prompts, sampled and scored.

Every evaluation of a run draws the same noise, so before and after differ by the weights alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from retrain.data.prompts import fingerprint
from retrain.records.entries import EvaluationRecord
from retrain.records.evaluation import Evaluation
from retrain.records.state import Stage
from retrain.rewards.scoring import check_held_out
from retrain.run.dialogues import SamplingPlan, Watcher
from retrain.run.rollout import Sampler
from retrain.run.step_record import judge_fields
from retrain.system import grouped
from retrain.types import Group, Prompt


@dataclass
class Evaluator:
    """Samples the held-out prompts and scores them with the sampler's reward."""

    sampler: Sampler
    sets: Sequence[tuple[Sequence[Prompt], SamplingPlan]]
    """The prompts of each task, and the plan for sampling their answers."""
    ks: Sequence[int]
    max_failure_rate: float = 1.0

    @cached_property
    def heldout_sha256(self) -> dict[str, str]:
        """Task -> sha256 of its examples, in the order of the prompts."""
        asked = chain.from_iterable(prompts for prompts, _ in self.sets)
        examples = grouped((prompt.example.task, prompt.example) for prompt in asked)
        return {task: fingerprint(own) for task, own in examples.items()}

    @property
    def completions(self) -> int:
        """Completions of one evaluation."""
        return sum(len(prompts) * plan.group_size for prompts, plan in self.sets)

    def run(
        self, step: int, watcher: Watcher, stage: Stage = "rl"
    ) -> tuple[Evaluation, list[Group]]:
        """Evaluate the current weights; return the answers too, one group per problem. Raises
        RunFailed if the reward could not judge too many answers.
        """
        # Step 0 of the noise's coordinates at every training step: common random numbers over the
        # run.
        rollouts = [self.sampler.draw(prompts, 0, plan, watcher) for prompts, plan in self.sets]
        groups = list(chain.from_iterable(rollout.groups for rollout in rollouts))
        check_held_out(
            (member.score for group in groups for member in group.members), self.max_failure_rate
        )
        evaluation = Evaluation(
            step=step,
            problems=[_problem(group, step) for group in groups],
            ks=sorted({1, *self.ks}),
            seconds=sum(rollout.sample_seconds + rollout.reward_seconds for rollout in rollouts),
            tokens=sum(rollout.tokens for rollout in rollouts),
            heldout_sha256=self.heldout_sha256,
            stage=stage,
        )
        return evaluation, groups


def _problem(group: Group, step: int) -> EvaluationRecord:
    rewards = group.rewards
    return EvaluationRecord(
        step=step,
        example_id=group.prompt.prompt_id,
        task=group.prompt.example.task,
        samples=len(rewards),
        correct=group.correct,
        could_not_judge=len(group) - len(rewards),
        reward_mean=float(np.mean(rewards)) if rewards else None,
        **judge_fields([group]),
    )

"""The observer of a run, which writes each step down, and the conditions under which a step stops
the run.
"""

from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import Any

from retrain.backends.declared import is_raw
from retrain.config.plan import Plan
from retrain.config.schema import Inference, Lora
from retrain.errors import RunFailed
from retrain.records.entries import SftRecord, StepRecord
from retrain.records.state import TrainerState
from retrain.records.terminal import counted
from retrain.records.untrained import (
    ENOUGH,
    is_news,
    is_skipped,
    untrained_line,
    untrained_streak,
)
from retrain.rewards import box_reader
from retrain.run.notes import reference_note
from retrain.run.parts import Parts
from retrain.run.step_record import (
    RewardStatistics,
    Step,
    credit_fields,
    environment_fields,
    generation_records,
    identical_chance,
    judge_fields,
    peak_memory_gib,
    result_fields,
    reward_fields,
    reward_statistics,
    task_fields,
    token_table,
)
from retrain.tracking import Tracker
from retrain.tracking.base import Generations, Tokens
from retrain.types import StepResult

_NONFINITE_LIMIT = 3
_IMPOSSIBLE = 1e-9
"""A chance so small that no step of a thousand runs reaches it."""
_MISMATCH_STEPS = 3

_LIMIT_FACTOR = 10
_LIMIT_FLOOR, _LIMIT_FLOOR_HALF = 1e-3, 0.02
"""Rounding grows while a policy sharpens, so ten times a gate that measured 1e-6 would stop sound
runs."""


class StepObserver:
    """Writes every step down once, after its learning. Every process has one; rank 0 alone has
    sinks to write to.
    """

    def __init__(self, plan: Plan, parts: Parts, tracker: Tracker) -> None:
        self.plan = plan
        self.config = plan.config
        self.parts = parts
        self.tracker = tracker
        self._boxes = None
        reward = parts.sources[0].config.reward
        # Rewards of a mixture may read boxes differently, or not.
        if not parts.has_turns and all(one.config.reward == reward for one in parts.sources):
            self._boxes = box_reader(reward)
        self._said_rewritten = False
        self._said_identical = False
        self._laid_out = parts.backend.engine.layout_seconds
        self.records: list[StepRecord] = []
        """The steps of all sessions, oldest first."""

    @property
    def untrained(self) -> list[StepRecord]:
        """The newest steps, newest first, if they trained nothing."""
        return untrained_streak(reversed(self.records))

    def unlearned(self, steps: int) -> str:
        """Return the line about the last steps of a run if they trained nothing; "" for any other
        run. `steps` is the length of the run.
        """
        if len(self.untrained) >= min(ENOUGH, steps):
            return self._untrained_line()
        return ""

    def _untrained_line(self) -> str:
        known = ""
        if self._boxes:
            reward = self.parts.sources[0].config.reward
            known = reference_note(reward, self.parts.prompts.examples, share=0.5)
        return untrained_line(self.untrained, known)

    def rewards(self, step: Step) -> RewardStatistics:
        """Summarize the rewards of a step."""
        return reward_statistics(step.rollout, self._boxes)

    def observe(
        self,
        step: Step,
        rewards: RewardStatistics,
        state: TrainerState,
        decision: Mapping[str, Any],
    ) -> None:
        """Write a step down. `state` is the run's state after the step, and `decision` has the
        fields of the back pressure's decision.
        """
        also: dict[str, Any] = {"scheduled": self.plan.moved(step.number) or None}
        if self.config.data.mix:
            also["by_task"] = task_fields(step.rollout)
        record = self._record(step, rewards, state, {**decision, **also})
        self.records.append(record)
        records = generation_records(
            step.number,
            step.rollout.groups,
            step.credit,
            in_turns=self.parts.has_turns,
        )
        self.tracker.emit(Generations(step.number, records))
        self._tell_rewritten(step)
        if self.tracker.wants_tokens(step.number):
            table = token_table(step.credit, self.parts.credit.needs_planning, step.log_ratios)
            self.tracker.emit(Tokens(step.number, table))
        self.tracker.emit(record)
        if is_news(self.untrained):
            self.tracker.message(self._untrained_line())
        if step.result.nonfinite_updates:
            self.tracker.message(
                f"Step {step.number}: {step.result.nonfinite_tensor} was not finite, skipped"
                f" {counted(step.result.nonfinite_updates, 'update')}."
            )

    def _tell_rewritten(self, step: Step) -> None:
        """Say once that trajectories have several rows."""
        trajectories = chain.from_iterable(group.trajectories for group in step.rollout.groups)
        rewritten = sum(len(trajectory.parts()) > 1 for trajectory in trajectories)
        if rewritten and not self._said_rewritten:
            self._said_rewritten = True
            self.tracker.message(
                f"Step {step.number}: {rewritten} trajectories have more than one row, since"
                " the chat template or the environment rewrites earlier turns. Each row holds"
                " the context that the model saw."
            )

    def _record(
        self,
        step: Step,
        rewards: RewardStatistics,
        state: TrainerState,
        decision: Mapping[str, Any],
    ) -> StepRecord:
        pipeline, sepa, groups = self.parts.credit, self.parts.sepa, step.rollout.groups
        uses_sepa, planning = pipeline.uses_sepa_controller, step.credit.tokens.planning
        return StepRecord(
            step=step.number,
            condition=self.config.condition_label,
            **result_fields(step.result),
            **credit_fields(step.credit, len(groups) - len(step.credit.groups)),
            **reward_fields(rewards, step.result),
            **judge_fields(step.rollout.drawn),
            **(environment_fields(step.rollout) if self.parts.has_turns else {}),
            **decision,
            running_correct_rate=state.correct / state.judged if state.judged else None,
            sepa_lambda=step.sepa_lambda if uses_sepa else None,
            sepa_gate_open=sepa.gate_open if uses_sepa else None,
            sepa_gate_step=sepa.gate_step if uses_sepa else None,
            identical_chance=self._identical_chance(step, decision),
            reward_could_not_judge=sum(
                len(group) - len(group.rewards) for group in step.rollout.drawn
            ),
            num_datums=sum(row.trained for row in step.rows),
            groups_redrawn=step.rollout.redrawn,
            batch_size=len(groups),
            next_batch_size=state.batch_size,
            group_size=self.config.training.group_size,
            plan_token_fraction=(
                float(planning.mean()) if pipeline.needs_planning and len(planning) else None
            ),
            uncertainty_kind=pipeline.uncertainty_kind if pipeline.needs_uncertainty else None,
            time_sample_s=step.rollout.sample_seconds,
            time_layout_s=self._layout_seconds(),
            time_reward_s=step.rollout.reward_seconds,
            time_credit_s=step.clock.seconds["credit"],
            time_learn_s=step.clock.seconds["learn"],
            step_time_s=step.clock.total,
            tokens_per_s=step.rollout.tokens / step.clock.total,
            peak_memory_gib=peak_memory_gib(self.parts.backend.device_name),
        )

    def _layout_seconds(self) -> float | None:
        """Return the record's time_layout_s."""
        if self.config.model.train != "full":
            return None
        before, self._laid_out = self._laid_out, self.parts.backend.engine.layout_seconds
        return self._laid_out - before

    def _identical_chance(self, step: Step, fields: Mapping[str, Any]) -> float | None:
        """Return the record's identical_chance, and say once that completions cannot be identical
        by chance. `fields` are the other fields of the record.
        """
        scheduled = fields.get("scheduled") or {}
        temperature = scheduled.get("training.temperature", self.config.training.temperature)
        if is_raw(self.parts.backend.engine.capabilities, temperature):
            return None
        chance = identical_chance(step.rollout.drawn)
        if chance < _IMPOSSIBLE and not self._said_identical:
            self._said_identical = True
            self.tracker.message(
                f"Step {step.number}: completions of one prompt are identical, and by their"
                f" log-probs the chance is below {chance:.0e}. The engine does not sample them"
                " independently; check how it takes n, seed and temperature. Every step"
                " records identical_chance."
            )
        return chance


# -- conditions under which a step stops the run ---------------------------------------------------


def default_mismatch_limit(gate_mean: float, *, half_precision: bool) -> float:
    """Return the default of [inference] max_logprob_diff in nats: ten times the gate's own mean,
    and above the noise of the precision.
    """
    return max(_LIMIT_FACTOR * gate_mean, _LIMIT_FLOOR_HALF if half_precision else _LIMIT_FLOOR)


def mismatch_limit(
    inference: Inference, lora: Lora, gate_mean: float, *, half_precision: bool, samples_ahead: bool
) -> float | None:
    """Return the limit of a run in nats; None if there is none.

    Dropout and weights that are one step old move the ratio by themselves, so there only a limit
    from the user holds.
    """
    if inference.max_logprob_diff is not None:
        return inference.max_logprob_diff or None
    if lora.dropout or samples_ahead:
        return None
    return default_mismatch_limit(gate_mean, half_precision=half_precision)


def check_updates(records: Sequence[StepRecord] | Sequence[SftRecord], result: StepResult) -> None:
    """Raise RunFailed if the last three steps have no finite update."""
    newest = records[-_NONFINITE_LIMIT:]
    skipped = len(newest) == _NONFINITE_LIMIT and all(map(is_skipped, newest))
    if skipped and result.nonfinite_updates:
        raise RunFailed(
            f"{result.nonfinite_tensor} was not finite in {_NONFINITE_LIMIT} steps in a row."
            " The weights come from the last finite update. Start a new run from them with a"
            ' lower [training] lr, [loss] max_grad_norm = 1.0 or [model] dtype = "fp32". Name'
            " an adapter by [lora] init_from, a `retrain export` by [model] model."
        )


def check_mismatch(
    records: Sequence[StepRecord], limit: float, gate_mean: float, resume: str
) -> None:
    """Raise RunFailed if the mean |log-ratio| of the last three trained steps is above `limit`. The
    command `resume` continues the run.
    """
    means = (record.logprob_diff_mean for record in reversed(records) if record.num_datums)
    newest = list(islice((mean for mean in means if mean is not None), _MISMATCH_STEPS))
    # NaN is above every limit.
    if len(newest) == _MISMATCH_STEPS and not any(mean <= limit for mean in newest):
        raise RunFailed(
            f"Sampler and learner differed by {newest[0]:.2g} nats per token on average at step"
            f" {records[-1].step}, above the limit of {limit:.2g} for {_MISMATCH_STEPS} steps in"
            f" a row. The parity gate had measured {gate_mean:.1e}, so the"
            " engine no longer samples the trained policy. Look at logprob_diff_mean in"
            " metrics.jsonl and at the engine, or set [inference] max_logprob_diff (0 is off)"
            f" and continue with `{resume}`."
        )


def untrained_mismatch_line(number: int, result: StepResult, limit: float | None) -> str:
    """Warn of a step that trained no token and whose tokens differ by more than the limit for
    trained tokens.
    """
    return (
        f"Step {number} trained nothing. Sampler and learner differed by"
        f" {result.logprob_diff_mean:.2g} nats per token over {result.logprob_diff_tokens} of its"
        f" tokens, above the limit of {limit:.2g}, which ignores such steps."
    )

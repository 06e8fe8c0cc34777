"""The observer of a run, which writes each step down, and the conditions under which a step stops
the run.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from retrain.backends.base import Backend
from retrain.backends.declared import is_raw
from retrain.config import TrainConfig
from retrain.config.plan import Plan
from retrain.errors import RunFailed
from retrain.records.entries import SftRecord, StepRecord
from retrain.records.evaluation import Evaluation, read_evaluations
from retrain.records.run_folder import RunFolder
from retrain.records.state import TrainerState
from retrain.records.terminal import counted
from retrain.records.untrained import (
    ENOUGH,
    Streak,
    is_news,
    is_skipped,
    untrained_line,
)
from retrain.rewards import box_reader
from retrain.run.notes import reference_note
from retrain.run.parts import RunParts, is_rounded
from retrain.run.step_record import (
    Step,
    credit_fields,
    environment_fields,
    generation_records,
    identical_chance,
    judge_fields,
    peak_memory_gib,
    result_fields,
    reward_fields,
    task_fields,
    token_table,
)
from retrain.tracking import Tracker
from retrain.tracking.base import Generations, Tokens
from retrain.types import StepResult

RECENT = 3
"""Steps in a row after which a fault stops the run."""
_IMPOSSIBLE = 1e-9
"""A chance so small that no step of a thousand runs reaches it."""

_LIMIT_FACTOR = 10
_LIMIT_FLOOR, _LIMIT_FLOOR_HALF = 1e-3, 0.02
"""Rounding grows while a policy sharpens, so ten times a gate that measured 1e-6 would stop sound
runs."""


Record = StepRecord | SftRecord | Evaluation


@dataclass
class Past:
    """The records of all sessions, as far as lines, guards and the summary need them."""

    newest: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=RECENT))
    supervised: deque[SftRecord] = field(default_factory=lambda: deque(maxlen=RECENT))
    """The newest steps of the supervised stage."""
    log_ratios: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    """logprob_diff_mean of the newest steps that trained a token."""
    untrained: Streak = field(default_factory=Streak)
    before: Evaluation | None = None
    """The evaluation of the untrained weights."""
    after: Evaluation | None = None
    """The newest evaluation."""

    @staticmethod
    def read(folder: RunFolder, ks: Sequence[int]) -> "Past":
        """Read the records of earlier sessions."""
        past = Past()
        records: Iterable[Record] = chain(
            StepRecord.read(folder.metrics),
            SftRecord.read(folder.sft),
            read_evaluations(folder.sft_evaluation, ks, "sft"),
            read_evaluations(folder.evaluation, ks),
        )
        for record in records:
            past.add(record)
        return past

    def add(self, record: Record) -> None:
        """Take up the next record."""
        match record:
            case Evaluation():
                if record.step == 0:
                    self.before = self.before or record
                self.after = record
            case SftRecord():
                self.supervised.append(record)
            case StepRecord():
                self.newest.append(record)
                if record.num_datums and record.logprob_diff_mean is not None:
                    self.log_ratios.append(record.logprob_diff_mean)
                self.untrained = self.untrained.after(record)


@dataclass
class StepObserver:
    """Writes every step down once, after its learning. Every process has one; rank 0 alone has
    sinks to write to.
    """

    plan: Plan
    parts: RunParts
    tracker: Tracker

    def __post_init__(self) -> None:
        self.config, self.past = self.plan.config, Past()
        self._boxes = None
        self._reward = self.parts.sources[0].config.reward
        # Rewards of a mixture may read boxes differently, or not.
        alike = all(one.config.reward == self._reward for one in self.parts.sources)
        if alike and not self.parts.has_turns:
            self._boxes = box_reader(self._reward)
        self._said_rewritten = self._said_identical = False
        self._laid_out = self.parts.backend.engine.layout_seconds

    def unlearned(self, steps: int) -> str:
        """Return the line about the last steps of a run if they trained nothing; "" for any other
        run. `steps` is the length of the run.
        """
        if self.past.untrained.steps >= min(ENOUGH, steps):
            return self._untrained_line()
        return ""

    def _untrained_line(self) -> str:
        known = ""
        if self._boxes:
            known = reference_note(self._reward, self.parts.prompts.examples, share=0.5)
        return untrained_line(self.past.untrained, self.config, known)

    def observe(self, step: Step, state: TrainerState, decision: Mapping[str, Any]) -> None:
        """Write a step down. `state` is the run's state after the step, and `decision` has the
        fields of the back pressure's decision.
        """
        before, self._laid_out = self._laid_out, self.parts.backend.engine.layout_seconds
        own = {
            "scheduled": self.plan.moved(step.number) or None,
            "by_task": task_fields(step.rollout) if self.config.data.mix else None,
            "time_layout_s": self._laid_out - before if self.config.model.train == "full" else None,
        }
        record = self._record(step, state, {**decision, **own})
        self.past.add(record)
        number, groups, in_turns = step.number, step.rollout.groups, self.parts.has_turns
        records = generation_records(number, groups, step.credit, in_turns=in_turns)
        self.tracker.emit(Generations(number, records))
        rewritten = sum(len(one.parts()) > 1 for group in groups for one in group.trajectories)
        if rewritten and not self._said_rewritten:
            self._said_rewritten = True
            self.tracker.message(
                f"Step {step.number}: {rewritten} trajectories have more than one row, since"
                " the chat template or the environment rewrites earlier turns. Each row holds"
                " the context that the model saw."
            )
        if self.tracker.wants_tokens(step.number):
            table = token_table(step.credit, self.parts.credit.needs_planning, step.log_ratios)
            self.tracker.emit(Tokens(step.number, table))
        self.tracker.emit(record)
        if is_news(self.past.untrained):
            self.tracker.message(self._untrained_line())
        if step.result.nonfinite_updates:
            self.tracker.message(
                f"Step {step.number}: {step.result.nonfinite_tensor} was not finite, skipped"
                f" {counted(step.result.nonfinite_updates, 'update')}."
            )

    def check(self, step: Step, state: TrainerState, resume: str) -> None:
        """Raise RunFailed if the run should not go on after `step`, which led to `state`. The
        command `resume` continues the run.
        """
        past, result, gate_mean = self.past, step.result, state.gate_mismatch or 0.0
        check_updates(past.newest, result)
        limit = logprob_diff_limit(self.config, self.parts.backend, gate_mean)
        if limit is None:
            return
        if past.newest[-1].num_datums:
            check_mismatch(past.log_ratios, step.number, limit, gate_mean, resume)
        elif not (result.logprob_diff_mean or 0.0) <= limit:
            self.tracker.message(
                f"Step {step.number} trained nothing. Sampler and learner differed by"
                f" {result.logprob_diff_mean:.2g} nats per token over"
                f" {result.logprob_diff_tokens} of its tokens, above the limit of {limit:.2g},"
                " which ignores such steps."
            )

    def _record(self, step: Step, state: TrainerState, decision: Mapping[str, Any]) -> StepRecord:
        pipeline, sepa, groups = self.parts.credit, self.parts.sepa, step.rollout.groups
        uses_sepa, planning = pipeline.uses_sepa_controller, step.credit.tokens.planning
        return StepRecord(
            step=step.number,
            condition=self.config.condition_label,
            **result_fields(step.result),
            **reward_fields(step.rollout, self._boxes, step.result.entropy_mean),
            **credit_fields(step.credit, len(groups) - len(step.credit.groups)),
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
            time_reward_s=step.rollout.reward_seconds,
            time_credit_s=step.clock.seconds["credit"],
            time_learn_s=step.clock.seconds["learn"],
            step_time_s=step.clock.total,
            tokens_per_s=step.rollout.tokens / step.clock.total,
            peak_memory_gib=peak_memory_gib(self.parts.backend.device_name),
        )

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


def default_logprob_diff_limit(gate_mean: float, *, half_precision: bool) -> float:
    """Return the default of [inference] max_logprob_diff in nats: ten times the gate's own mean,
    and above the noise of the precision.
    """
    return max(_LIMIT_FACTOR * gate_mean, _LIMIT_FLOOR_HALF if half_precision else _LIMIT_FLOOR)


def logprob_diff_limit(config: TrainConfig, backend: Backend, gate_mean: float) -> float | None:
    """Return the limit of a run's logprob_diff_mean in nats; None for a run without a limit.

    Dropout and weights that are one step old move the ratio by themselves, so there only a limit
    from the user holds.
    """
    if config.inference.max_logprob_diff is not None:
        return config.inference.max_logprob_diff or None
    if config.dropout or backend.capabilities.samples_ahead:
        return None
    rounded = is_rounded(config.inference, backend)
    return default_logprob_diff_limit(gate_mean, half_precision=rounded)


def check_updates(records: Collection[StepRecord | SftRecord], result: StepResult) -> None:
    """Raise RunFailed if the newest `records`, RECENT of them, have no finite update."""
    if len(records) == RECENT and all(map(is_skipped, records)) and result.nonfinite_updates:
        raise RunFailed(
            f"{result.nonfinite_tensor} was not finite in {RECENT} steps in a row."
            " The weights come from the last finite update. Start a new run from them with a"
            ' lower [training] lr, [loss] max_grad_norm = 1.0 or [model] dtype = "fp32". Name'
            " an adapter by [lora] init_from, a `retrain export` by [model] model."
        )


def check_mismatch(
    means: Sequence[float], step: int, limit: float, gate_mean: float, resume: str
) -> None:
    """Raise RunFailed if the mean |log-ratio| of the last three trained steps is above `limit`. The
    command `resume` continues the run.
    """
    # NaN is above every limit.
    if len(means) == RECENT and not any(mean <= limit for mean in means):
        raise RunFailed(
            f"Sampler and learner differed by {means[-1]:.2g} nats per token on average at step"
            f" {step}, above the limit of {limit:.2g} for {RECENT} steps in a row. The parity gate"
            f" had measured {gate_mean:.1e}, so the engine no longer samples the trained policy."
            " Look at logprob_diff_mean in metrics.jsonl and at the engine, or set [inference]"
            f" max_logprob_diff (0 is off) and continue with `{resume}`."
        )

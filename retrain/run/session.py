"""What a run is made of between two steps: its folder, its parts, its state, and what is due."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path

import numpy as np
import numpy.typing as npt

from retrain.advantages.pipeline import Credit
from retrain.advantages.sepa import SEPAController
from retrain.backends.local.micro_batches import is_trained
from retrain.config import TrainConfig
from retrain.distributed import ALONE, World, joined
from retrain.errors import EnvironmentFailure, Interrupted, RetrainError, RunFailed
from retrain.parsing import read_object
from retrain.records.checkpoint import replace_file
from retrain.records.evaluation import Evaluation
from retrain.records.printing import counted
from retrain.records.terminal import clean
from retrain.run.gate import default_mismatch_limit
from retrain.run.interrupts import Interrupts
from retrain.run.notes import preflight_lines, refuse_lone_sharding, refuse_not_built
from retrain.run.opening import Opening, open_run
from retrain.run.parts import Parts, is_rounded, load_parts, run_parity_gate, training_plan
from retrain.run.rollout import Ahead, Rollout, Watcher
from retrain.run.step_record import (
    StepClock,
    credit_fields,
    generation_records,
    peak_memory_gib,
    result_fields,
    reward_fields,
    reward_statistics,
    token_table,
)
from retrain.tracking import EvaluationRecord, RunSummary, StepRecord, Tracker, build_tracker, read_jsonl
from retrain.types import Float32Array, Group, Prompt, Row, StepResult

_NONFINITE_LIMIT = 3
_MISMATCH_STEPS = 3
_SAVE_ATTEMPTS = 3
_CHECKPOINT_BYTES_PER_PARAMETER = 12  # fp32 weight and two AdamW moments


class Session:
    """One process's share of a run: between steps, `state` and the backend are all that changes."""

    def __init__(self, opening: Opening, tracker: Tracker, interrupts: Interrupts, parts: Parts, world: World = ALONE) -> None:
        self.config = opening.config
        self.folder = opening.folder
        self.store = opening.store
        self.state = opening.state
        self.tracker = tracker
        self.interrupts = interrupts
        self.parts = parts
        self.world = world
        self.sepa = SEPAController(self.config.sepa)
        self.plan = training_plan(self.config)
        self.clock = StepClock()
        self.ahead = Ahead(interrupts.check) if parts.backend.capabilities.samples_ahead else None
        self._record: StepRecord | None = None
        self._evaluations: list[Evaluation] = []
        self._saved_at = -1
        self._failed_saves = 0
        self._synced = -1
        """The step whose weights the engine samples by."""
        self._gate_repeated = False

    @classmethod
    @contextmanager
    def open(cls, config: TrainConfig, *, overwrite: bool, quiet: bool) -> Iterator["Session"]:
        """Everything loaded, restored and checked, so that the next thing to do is a step. Closes what it opened."""
        refuse_not_built(config)
        with joined() as world, _opened(config, overwrite, world) as opening, Interrupts() as interrupts:
            tracker = _tracker(opening, quiet) if world.leader else Tracker()
            try:
                for line in (*preflight_lines(opening.config), *opening.notes):
                    tracker.message(line)
                if world.size > 1:
                    tracker.message(f"{world.size} processes share this run: each samples its prompts and learns its rows, as one would.")
                with closing(load_parts(opening.config, opening.state.choices, tracker.message, world)) as parts:
                    session = cls(opening, tracker, interrupts, parts, world)
                    try:
                        session._restore(opening)
                        session._pass_gate()
                        with closing(session.ahead) if session.ahead else nullcontext():
                            yield session
                    except Exception as error:
                        session._sum_up_failure(error)
                        raise
            finally:
                tracker.close()

    def _restore(self, opening: Opening) -> None:
        """Put the checkpoint's state into the parts, and make the folder ready for its first line."""
        backend = self.parts.backend
        if opening.checkpoint:
            backend.load(opening.checkpoint.folder)
            for note in self.sepa.load_state_dict(self.state.sepa):
                self.tracker.message(note)
            self.parts.guard.load_state_dict(self.state.rewards)
            self._saved_at = opening.checkpoint.step
            if self.world.leader:
                self._evaluations = list(_stored_evaluations(self.folder.evaluation, self.config.evaluation.k))
                self._record = _last_record(self.folder.metrics)
        if self.state.choices not in (None, backend.choices):
            self.tracker.message("The choices from the machine differ from the stored ones: from here on this run is not byte-exact.")
        self.state.choices = backend.choices
        self.tracker.start(backend.device_name)

    def _pass_gate(self) -> None:
        result = run_parity_gate(self.config, self.parts, self.state.step)
        if self.state.gate_mismatch is None:
            self.state.gate_mismatch = result.mean_difference
        if not self.world.leader:
            return
        self.tracker.message(result.line())
        environment = read_object(self.folder.environment)
        environment |= {"parity_gate": result.to_json(), "data_sha256": self.parts.prompts.fingerprint}
        environment |= {"engine": asdict(self.parts.backend.engine.capabilities), "backend": asdict(self.parts.backend.capabilities)}
        replace_file(self.folder.environment, json.dumps(environment, indent=2) + "\n")
        self.store.rehearse(_CHECKPOINT_BYTES_PER_PARAMETER * self.parts.backend.num_trainable)

    # -- one step ------------------------------------------------------------------------------------------------------

    def next_prompts(self, after: int = 0) -> list[Prompt]:
        """Those of the next batch, once `after` more have been used up."""
        return self.parts.prompts.batch(self.state.cursor + after, self.state.batch_size, self.state.seed)

    def watch(self, label: str, completions: int) -> Watcher:
        """Shows progress, and stops between two completions when a signal asks for it; of several processes none stops alone."""
        done = 0
        completions = -(-completions // self.world.size)

        def count(_: object) -> None:
            nonlocal done
            done += 1
            self.tracker.progress(label, done, completions)

        return Watcher(check=self.interrupts.check if self.world.size == 1 else _never, completion=count)

    def stop_if_asked(self) -> None:
        """Raises Interrupted in every process, if one of them got the signal."""
        self.interrupts.adopt(self.world.gather(self.interrupts.stopped_by))
        self.interrupts.check()

    def _sync(self) -> None:
        """Let the engine sample by the learner's weights of this moment; once a step, since a server reads the adapter from a disk.

        What left the process is checked again at its first new adapter: so far the gate saw adapters that it had made itself.
        """
        step, engine = self.state.step, self.parts.backend.engine
        if self._synced == step:
            return
        engine.sync(self.parts.backend.save_adapter, step)
        if self._synced >= 0 and not self._gate_repeated and not engine.capabilities.in_process:
            self.tracker.message(run_parity_gate(self.config, self.parts, step, trained=True).line())
            self._gate_repeated = True
        self._synced = step

    def sample(self) -> Rollout:
        """The scored groups of this step, drawn now unless they were drawn ahead."""
        rollout = self.ahead.take() if self.ahead else None
        if rollout is None:
            prompts = self.next_prompts()
            self._sync()
            watcher = self.watch(f"Step {self.state.step}: sampling", len(prompts) * self.plan.group_size)
            rollout = self.parts.sampler.draw(prompts, self.state.step, self.plan, watcher)
        for group in rollout.groups:
            judged = group.judged()
            correct = sum(reward > self.config.reward.correct_threshold for reward in judged.rewards)
            self.tracker.group(correct, len(judged), group.prompt.example.reference)
        return rollout

    def sample_ahead(self, drawn: int) -> None:
        """Split mode: let the next step be sampled while this one is learned; `drawn` prompts were this step's.

        Not across a checkpoint or an evaluation: a resumed run and an undisturbed one sample by the same weights then.
        """
        step = self.state.step + 1
        if self.ahead is None or self._save_due(step) or self._evaluation_due(step):
            return
        self._sync()
        prompts = self.next_prompts(after=drawn)
        self.ahead.start(lambda watcher: self.parts.sampler.draw(prompts, step, self.plan, watcher))

    def log_ratios(self, rows: Sequence[Row]) -> list[Float32Array] | None:
        """[T] of each row, learner - sampler log-prob before the step, NaN for a row that is not trained; None in a step whose tokens
        nobody stores.
        """
        if not self.world.from_leader(self.tracker.wants_tokens(self.state.step)):  # in a parallel run all processes score, or none
            return None
        trained = [is_trained(row, self.config.loss) for row in rows]
        own = iter(self.parts.backend.logprobs([row for row, scored in zip(rows, trained, strict=True) if scored]))
        return [
            next(own) - row.logprobs if scored else np.full(row.num_actions, np.nan, np.float32)
            for row, scored in zip(rows, trained, strict=True)
        ]

    def observe(
        self,
        rollout: Rollout,
        credit: Credit,
        rows: Sequence[Row],
        result: StepResult,
        sepa_lambda: float,
        log_ratios: Sequence[Float32Array] | None = None,
    ) -> None:
        """Write the step down and move the state past it."""
        state, step = self.state, self.state.step
        rewards = reward_statistics(rollout)
        state.correct += rewards.correct
        state.judged += rewards.judged
        state.tokens += rollout.tokens
        state.seconds += self.world.from_leader(self.clock.total)
        uses_sepa = self.parts.credit.uses_sepa_controller
        self.sepa.observe(rewards.correct_rate, step)
        self.sepa.update_auto(credit.exec_uncertainty)
        self._record = StepRecord(
            step=step,
            condition=self.config.condition_label,
            **result_fields(result),
            **credit_fields(credit, len(rollout.groups) - len(credit.groups)),
            **reward_fields(rewards),
            running_correct_rate=state.correct / state.judged if state.judged else None,
            sepa_lambda=sepa_lambda if uses_sepa else None,
            sepa_gate_open=self.sepa.gate_open if uses_sepa else None,
            sepa_gate_step=self.sepa.gate_step if uses_sepa else None,
            reward_could_not_judge=sum(score.reward is None for group in rollout.drawn for score in group.scores),
            num_datums=sum(is_trained(row, self.config.loss) for row in rows),
            groups_redrawn=rollout.redrawn,
            batch_size=len(rollout.groups),
            next_batch_size=state.batch_size,
            group_size=self.plan.group_size,
            plan_token_fraction=_fraction(credit.tokens.planning) if self.parts.credit.needs_planning else None,
            uncertainty_kind=self.parts.credit.uncertainty_kind if self.parts.credit.needs_uncertainty else None,
            time_sample_s=rollout.sample_seconds,
            time_reward_s=rollout.reward_seconds,
            time_credit_s=self.clock.seconds["credit"],
            time_learn_s=self.clock.seconds["learn"],
            step_time_s=self.clock.total,
            tokens_per_s=rollout.tokens / self.clock.total,
            peak_memory_gib=peak_memory_gib(self.parts.backend.device_name),
        )
        self.tracker.generations(step, generation_records(step, rollout.groups, credit))
        if self.tracker.wants_tokens(step):
            self.tracker.tokens(step, token_table(credit, self.parts.credit.needs_planning, log_ratios))
        self.tracker.step(self._record)
        state.cursor += len(rollout.groups)
        state.step += 1
        state.learning = False
        self._check_health(rollout, result)

    def _check_health(self, rollout: Rollout, result: StepResult) -> None:
        """Stop a run that learns nothing: updates that are never finite, rewards that cannot be judged."""
        state = self.state
        state.nonfinite_streak = state.nonfinite_streak + 1 if result.updates == 0 and result.nonfinite_updates else 0
        if result.nonfinite_updates:
            self.tracker.message(
                f"Step {state.step - 1}: {result.nonfinite_tensor} was not finite; skipped {counted(result.nonfinite_updates, 'update')}."
            )
        if state.nonfinite_streak >= _NONFINITE_LIMIT:
            raise RunFailed(
                f"{result.nonfinite_tensor} was not finite in {_NONFINITE_LIMIT} steps in a row; the weights are those of the last finite "
                "update: start a new run from them ([lora] init_from) with a lower [training] lr, [loss] max_grad_norm = 1.0 or "
                '[model] dtype = "fp32".'
            )
        self._check_mismatch(result)
        self.parts.guard.observe([score for group in rollout.drawn for score in group.scores])

    def _check_mismatch(self, result: StepResult) -> None:
        """Stop a run whose sampler has left the policy that is trained."""
        state, limit, mean = self.state, self.mismatch_limit, result.log_ratio_mean
        if limit is None or mean is None:
            return
        state.mismatch_streak = state.mismatch_streak + 1 if not mean <= limit else 0
        if state.mismatch_streak >= _MISMATCH_STEPS:
            raise RunFailed(
                f"Sampler and learner differed by {mean:.2g} nats per token on average at step {state.step - 1}, more than the limit of "
                f"{limit:.2g} for {_MISMATCH_STEPS} steps in a row, and the parity gate had measured {state.gate_mismatch or 0:.1e}: what "
                "is sampled is not the policy that is trained; look at log_ratio_mean in metrics.jsonl and at the engine, or set "
                f"[inference] mismatch_limit (0 is off) and go on with --resume {self.folder.path}."
            )

    @property
    def mismatch_limit(self) -> float | None:
        """Nats; None where it is off. Dropout and weights that are one step old move the ratio by themselves, so that only a limit that
        was given holds there.
        """
        inference, lora = self.config.inference, self.config.lora
        if inference.mismatch_limit is not None:
            return inference.mismatch_limit or None
        if lora.dropout or self.ahead is not None:
            return None
        return default_mismatch_limit(self.state.gate_mismatch or 0.0, half_precision=is_rounded(self.config, self.parts.backend))

    # -- what is due between steps -------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        return self.state.step >= self.config.training.max_steps or self._out_of_time

    @property
    def _out_of_time(self) -> bool:
        hours = self.config.training.max_hours
        return hours > 0 and self.state.seconds >= hours * 3600

    def evaluate_if_due(self) -> None:
        """Held-out evaluation of the current weights; once a step count, also over a resume."""
        evaluation, evaluator, step = self.config.evaluation, self.parts.evaluator, self.state.step
        if evaluator is None or not self._evaluation_due(step) or self.state.last_evaluation == step:
            return
        self._sync()
        result = evaluator.run(step, self.watch(f"Evaluation at step {step}", len(evaluator.prompts) * evaluation.samples))
        self.tracker.evaluation(result)
        self._evaluations.append(result)
        self.state.last_evaluation = step
        self.state.seconds += self.world.from_leader(result.seconds)

    def _evaluation_due(self, step: int) -> bool:
        evaluation = self.config.evaluation
        return (
            (evaluation.at_start and step == 0)
            or (evaluation.every > 0 and step > 0 and step % evaluation.every == 0)
            or (evaluation.at_end and step == self.config.training.max_steps)
        )

    def _save_due(self, step: int) -> bool:
        return step > 0 and (step % self.config.training.save_every == 0 or step >= self.config.training.max_steps or self._out_of_time)

    def save_if_due(self) -> None:
        if self._save_due(self.state.step) or self.interrupts.take_save_request() or self._failed_saves or self.tracker.is_behind:
            self.save_now()

    def save_now(self) -> None:
        """Checkpoint the state between two steps; within one there is none to save.

        A failure keeps the checkpoint before and is tried again after the next step.
        """
        if self._saved_at == self.state.step or self.state.learning or not self.world.leader:
            return
        if self.ahead:
            self.ahead.drop()
        self.state.sepa = self.sepa.state_dict()
        self.state.rewards = self.parts.guard.state_dict()
        self.state.tracking = self.tracker.state()
        try:
            self.state.files = self.tracker.sync()  # a checkpoint is never ahead of the rows of its steps
            self.store.save(self.state, self.parts.backend.save)
            replace_file(self.folder.trainer_state, self.state.to_json())
        except OSError as error:
            self._failed_saves += 1
            where = error.filename or self.store.folder
            sentence = f"The checkpoint of step {self.state.step} could not be written to {where}: {error.strerror or error}"
            if self._failed_saves >= _SAVE_ATTEMPTS or self.finished:
                raise EnvironmentFailure(
                    f"{sentence}, {counted(self._failed_saves, 'time')} in a row; free space there, then use --resume {self.folder.path}."
                ) from error
            self.tracker.message(f"{sentence}; trying again after the next step.")
            return
        self._saved_at = self.state.step
        self._failed_saves = 0

    # -- the end ---------------------------------------------------------------------------------------------------------

    def finish(self) -> RunSummary:
        """The last adapter, the summary, and the last lines on the screen."""
        if self.world.leader:
            self.store.save_final(self.state, self.parts.backend.save_adapter)
        if self._out_of_time and self.state.step < self.config.training.max_steps:
            self.tracker.message(
                f"[training] max_hours = {self.config.training.max_hours:g} is over after {self.state.step} of "
                f"{self.config.training.max_steps} steps; go on with --resume {self.folder.path} and a higher max_hours."
            )
        summary = self.summary("done")
        self.tracker.finish(summary)
        return summary

    def _sum_up_failure(self, error: Exception) -> None:
        """Leave a summary that says why the run does not go on."""
        if not self.folder.config.is_file():
            return  # it has not begun
        ours = isinstance(error, RetrainError)
        summary = self.summary("interrupted" if isinstance(error, Interrupted) else "failed")
        with suppress(OSError, EnvironmentFailure):  # a full disk may be the reason itself, which is on its way to the screen
            self.tracker.finish(replace(summary, reason=clean(str(error) if ours else f"{type(error).__name__}: {error}")))

    def summary(self, status: str) -> RunSummary:
        final = self.store.folder / "final"
        inside = final.is_relative_to(self.folder.path)
        return RunSummary(
            status=status,
            condition=self.config.condition_label,
            seed=self.state.seed,
            steps=self.state.step,
            seconds=self.state.seconds,
            tokens=self.state.tokens,
            before=next((item for item in self._evaluations if item.step == 0), None),
            after=next((item for item in reversed(self._evaluations) if item.step > 0), None),
            last=self._record,
            adapter=str(final.relative_to(self.folder.path) if inside else final),
        )


@contextmanager
def _opened(config: TrainConfig, overwrite: bool, world: World) -> Iterator[Opening]:
    """The leader opens the folder and holds its lock; the others are told what it found."""
    refuse_lone_sharding(config, world)
    if not world.leader:
        found: Opening | RetrainError | None = world.from_leader(None)
        if isinstance(found, RetrainError):
            raise SystemExit(found.exit_code)  # the leader has the sentence
        assert found is not None
        yield found
        return
    with ExitStack() as stack:
        try:
            opening = stack.enter_context(open_run(config, overwrite=overwrite))
        except RetrainError as error:
            world.from_leader(error)
            raise
        yield world.from_leader(opening)


def _tracker(opening: Opening, quiet: bool) -> Tracker:
    return build_tracker(
        opening.config,
        opening.folder,
        condition=opening.config.condition_label,
        quiet=quiet,
        resumed=opening.state.tracking,
        first_step=opening.state.step,
    )


def _never() -> None:
    """Processes that would wait for each other do not stop one by one."""


def usable_groups(rollout: Rollout) -> list[Group]:
    """The judged part of each group; one with fewer than two left because of what could not be judged is dropped."""
    judged = [group.judged() for group in rollout.groups]
    return [part for part, whole in zip(judged, rollout.groups, strict=True) if len(part) == len(whole) or len(part) >= 2]


def _fraction(mask: npt.NDArray[np.bool_]) -> float | None:
    return float(mask.mean()) if len(mask) else None


def _stored_evaluations(path: Path, ks: Sequence[int]) -> Iterator[Evaluation]:
    """The evaluations of the earlier sessions of a run."""
    if path.exists():
        records = [EvaluationRecord.from_json(line) for line in read_jsonl(path)]
        for step, problems in groupby(records, key=lambda record: record.step):
            yield Evaluation(step=step, problems=[*problems], ks=sorted({1, *ks}))


def _last_record(path: Path) -> StepRecord | None:
    lines = list(read_jsonl(path)) if path.exists() else []
    return StepRecord.from_json(lines[-1]) if lines else None
